"""How far does a reader walk? Counts the calls of this project's own functions for one image on a CPU, where no kernel
runs: calls, functions, files, and how often the next call is in another file.

python scripts/walk.py a_swin_tiny a_mvitv2_tiny [--trace]
"""

import argparse
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import shiftvit
from common import create_model
from common.evaluation.tables import format_table

ROOT = Path(__file__).resolve().parents[1]


def walk(name: str) -> list[tuple[str, str]]:
    """(file, function) of every call of ours in one forward of a model, in turn."""
    model, calls = create_model(name).eval(), []
    folders = tuple(str(ROOT / folder) + "/" for folder in ("common", "swin", "swinv2", "cvt", "mvitv2"))
    x = torch.randn(1, model.in_chans, *model.img_size)

    def note(frame: FrameType, event: str, argument: Any) -> None:
        named = event == "call" and not frame.f_code.co_name.startswith("<")  # no lambda, no comprehension
        if named and (file := frame.f_code.co_filename).startswith(folders):
            calls.append((str(Path(file).relative_to(ROOT)), frame.f_code.co_qualname))

    with torch.no_grad():
        sys.setprofile(note)
        try:
            model(x)
        finally:
            sys.setprofile(None)
    return calls


def count(calls: list[tuple[str, str]]) -> dict[str, int]:
    files = [file for file, _ in calls]
    changes = sum(a != b for a, b in pairwise(files))
    return {"calls": len(calls), "functions": len(set(calls)), "files": len(set(files)), "changes of file": changes}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", help="names of models")
    parser.add_argument("--trace", action="store_true", help="also print every function with how often it is called")
    args = parser.parse_args()
    rows = []
    for name in args.models:
        calls = walk(name)
        rows.append({"model": name, **count(calls)})
        if args.trace:
            print(format_table([{"file": file, "function": function, "calls": n}
                                for (file, function), n in Counter(calls).most_common()]))  # fmt: skip
    print(format_table(rows))


if __name__ == "__main__":
    shiftvit.run(main)
