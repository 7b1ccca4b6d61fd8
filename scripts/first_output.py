"""How long until a model gives its first output? Each model and mode in a process of its own, with empty caches.

python scripts/first_output.py --models a_swin_tiny a_cvt_13 --json first_output.json
python scripts/first_output.py --models a_swin_micro --modes eager --device cpu --batch_size 4

Seconds: ``import`` from the start of Python until a model can be built, ``build``, ``first`` until its output is there,
``second`` for the same again. Modes: ``eager``; ``warmed``, eager after ``warm_up``, whose time counts; ``compiled`` by
``model.compile()``; ``training``, one compiled step forward and backward.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import shiftvit

ROOT = Path(__file__).resolve().parents[1]
MODELS = ("a_swin_tiny", "a_swinv2_tiny", "a_cvt_13", "a_mvitv2_tiny")
MODES = ("eager", "warmed", "compiled", "training")
CACHES = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "CUDA_CACHE_PATH")
TARGETS = {"eager": 10, "warmed": 10, "compiled": 45, "training": 75}  # seconds on an H200 with 16 processors


def measure(name: str, mode: str, device: str, batch: int, begun: float) -> dict[str, Any]:
    """In a fresh process that began at ``begun``."""
    import torch

    from common import create_model

    imported = time.time()
    model = create_model(name).to(device).train(mode == "training")
    x = torch.rand(batch, 3, *model.img_size, device=device)  # type: ignore[misc]
    built = time.time()

    def step() -> float:
        start = time.time()
        with torch.set_grad_enabled(mode == "training"), torch.autocast(device, torch.bfloat16):
            y = model(x)
        if mode == "training":
            y.float().square().mean().backward()
        torch.cuda.synchronize() if device == "cuda" else None
        return time.time() - start

    if mode == "warmed":
        with torch.autocast(device, torch.bfloat16):
            model.warm_up(batch)  # type: ignore[operator]
    elif mode != "eager":
        model.compile()
    step()
    first = time.time() - built
    return {"import": imported - begun, "build": built - imported, "first": first, "second": step()}


def main(arguments: Sequence[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=MODELS, help="names of models")
    parser.add_argument(
        "--modes", nargs="+", choices=MODES, default=MODES, help="what comes before the first output (all)"
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="(%(default)s)")
    parser.add_argument("--batch_size", type=int, default=128, help="images at once (%(default)s)")
    parser.add_argument("--json", type=Path, help="file to write the table to")
    parser.add_argument("--begun", type=float, help=argparse.SUPPRESS)  # in the process that measures
    args = parser.parse_args(arguments)
    if args.batch_size < 1:  # by hand: the parser of other commands imports what is timed here
        parser.error(f"argument --batch_size: {args.batch_size} is not a positive whole number")
    if args.begun:
        print(json.dumps(measure(args.models[0], args.modes[0], args.device, args.batch_size, args.begun)))
        return []
    import torch
    from tqdm.auto import tqdm

    if args.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("torch finds no GPU here: give --device cpu")
    from common.evaluation.tables import format_table, write_json

    rows: list[dict[str, Any]] = []
    for name, mode in tqdm([(name, mode) for name in args.models for mode in args.modes], unit="process"):
        with tempfile.TemporaryDirectory() as caches:
            environment = {**os.environ, **{key: f"{caches}/{key}" for key in CACHES}, "PYTHONPATH": str(ROOT)}
            command = [sys.executable, __file__, "--models", name, "--modes", mode, "--device", args.device,
                       "--batch_size", str(args.batch_size), "--begun", repr(time.time())]  # fmt: skip
            done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode or not done.stdout.strip():
            last = (done.stderr.strip() or "nothing").splitlines()[-1][:300]
            raise ValueError(f"{name}, {mode}: its process ended with status {done.returncode} (-9: killed, often for "
                             f"want of memory). Its last words: {last}")  # fmt: skip
        seconds = {key: round(value, 2) for key, value in json.loads(done.stdout.splitlines()[-1]).items()}
        target = {"target": TARGETS[mode]} if args.device == "cuda" else {}
        rows.append({"model": name, "mode": mode, **seconds, **target})
        if args.json:
            write_json(args.json, {"device": args.device, "processors": os.cpu_count(), "batch": args.batch_size,
                                   "rows": rows})  # fmt: skip
    print(format_table(rows))
    return rows


if __name__ == "__main__":
    shiftvit.run(main)
