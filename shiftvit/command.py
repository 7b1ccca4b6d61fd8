"""The command ``shiftvit``: our scripts by name, wherever the packages are installed.

``shiftvit train swin --recipe photographs --data DIR`` is ``accelerate launch swin/train.py ...`` on one process;
``shiftvit predict --model a_swin_micro IMAGE`` is ``python scripts/predict.py ...``.
"""

import argparse
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from shiftvit import ROOT, check_all

__all__ = ["main"]

HERE = Path(__file__).resolve().parent
SCRIPTS = HERE / "scripts" if (HERE / "scripts").is_dir() else ROOT / "scripts"  # in a wheel, in a checkout
FOLDERS = ("swin", "swinv2", "cvt", "mvitv2", "segmentation")
COMMANDS = {
    "train": "train a model: shiftvit train [FOLDER] [--recipe NAME] [--data DIR] ...",
    "evaluate": "measure a model: shiftvit evaluate [FOLDER] --model DIR --data DIR ...",
    "predict": "label images, and show how the labels change when an image moves",
    "export": "write a model as a .pt2 or ONNX file",
    "app": "open a page that moves images before two models",
    "exactness": "count bit-identical logits under shifts",
    "battery": "measure all that the paper's tables ask for",
    "doctor": "check the kernels of this machine",
}


def main(arguments: Sequence[str] | None = None) -> None:
    words = list(sys.argv[1:] if arguments is None else arguments)
    table = "\n".join(f"  {name:<11}{what}" for name, what in COMMANDS.items())
    parser = argparse.ArgumentParser(prog="shiftvit", usage="shiftvit COMMAND [FLAGS]", add_help=True,
                                     description=f"commands:\n{table}\n\nFOLDER is one of {', '.join(FOLDERS)} (swin).",
                                     epilog="shiftvit COMMAND --help lists the flags of a command.",
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("command", choices=COMMANDS, metavar="COMMAND", help="see above")
    name = parser.parse_args(words[:1]).command
    rest = words[1:]
    if name in ("train", "evaluate"):
        folder = rest.pop(0) if rest and not rest[0].startswith("-") else FOLDERS[0]
        if folder not in FOLDERS:
            parser.error(f"shiftvit {name} {folder}: FOLDER is one of {', '.join(FOLDERS)}")
        script = ROOT / folder / f"{name}.py"
    else:
        script = SCRIPTS / f"{name}.py"
    check_all()
    sys.argv = [str(script), *rest]
    runpy.run_path(str(script), run_name="__main__")


if __name__ == "__main__":
    main()
