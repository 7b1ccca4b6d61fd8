"""Measure models side by side: speed, peak memory, parameters, FLOPs and kernels.

Contenders run in rounds, each for a few steps per round and in alternating order, so that a drifting clock or another
job on the machine affects all alike; a speed is the median over rounds, its spread the quartiles. A contender that
fails is reported with its error; the others go on. ``contenders`` says how they are named.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch
from tqdm.auto import tqdm

from .contenders import Contender, Setting, build, make_step, parse
from .profiling import count_flops, count_kernels, memory, peak_memory

__all__ = ["benchmark", "compare", "describe", "race", "reset"]


def benchmark(models: Sequence[str], setting: Setting, *, rounds: int = 20, block_seconds: float = 0.2,
              deadline: float = math.inf, kernels: bool = False) -> dict[str, Any]:  # fmt: skip
    """Compare ``models``: {"setting": ..., "rows": [...], "note": ...}, one row per model in the order given.

    ``rounds=0`` measures all but speed, with one model in memory at a time. After ``deadline`` (``time.monotonic``)
    nothing is begun. Ratios of medians say how much faster a model is than the first (``vs_first``), an adaptive one
    than its default (``vs_default``), and one of ours than the best of others (``vs_peer``); ``allocated_ratio`` and
    ``reserved_ratio`` are an adaptive model's memory over its default's.
    """
    reset(setting)
    rows: dict[str, dict[str, Any]] = {}
    contenders: list[Contender] = []
    for name in tqdm(dict.fromkeys(models), desc="prepare", leave=False, disable=None):
        try:
            if time.monotonic() > deadline:
                raise TimeoutError("not run: no time was left")
            contender = prepare(name, setting, block_seconds, kernels)
            rows[name] = contender.row
            contenders += [contender] if rounds else []
            del contender
        except Exception as error:
            rows[name] = {"model": name, "error": describe(error)}
        if not rounds:
            reset(setting)
    note = race(contenders, rounds, deadline)
    rows |= {contender.name: contender.result() for contender in contenders}
    contenders.clear()
    reset(setting)
    compare(rows)
    return {"setting": asdict(setting), "rows": list(rows.values()), "note": note}


def prepare(name: str, setting: Setting, block_seconds: float, kernels: bool) -> Contender:
    """Build, count, compile, warm up and weigh one contender."""
    before = memory(setting.device)
    model, x, setting = build(name, setting)
    row = {"model": name, "img_size": list(x.shape[2:]), "parameters": sum(p.numel() for p in model.parameters())}
    logits, row["gflops"] = count_flops(model, x[:1])
    contender = Contender(name, make_step(model, x, logits, setting), setting, setting.batch_size, row)
    contender.warm_up(block_seconds)
    row |= peak_memory(contender, before)
    row |= count_kernels(contender) if kernels else {}
    return contender


def race(contenders: list[Contender], rounds: int, deadline: float) -> str | None:
    """Time all contenders in ``rounds`` rounds, or until the deadline; returns a note if that came first."""
    for done in tqdm(range(rounds), desc="rounds", leave=False, disable=None):
        if done and contenders and time.monotonic() > deadline:
            return f"the time was used up after {done} of {rounds} rounds"
        for contender in contenders[:: -1 if done % 2 else 1]:
            if "error" not in contender.row:
                try:
                    contender.seconds.append(contender.time(contender.iterations))
                except Exception as error:
                    contender.row["error"], contender.step = describe(error), lambda: None  # lets go of the model
    return None


def describe(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"[:300]


def reset(setting: Setting) -> None:
    """Forget compiled code and give memory back."""
    torch._dynamo.reset()
    memory(setting.device)
    torch.backends.cudnn.benchmark = torch.device(setting.device).type == "cuda"  # for all contenders alike


def compare(rows: dict[str, dict[str, Any]]) -> None:
    """Add ratios to rows: of speeds and, for an adaptive model to its default, of memory."""
    speed, allocated, reserved = (
        {name: row[key] for name, row in rows.items() if isinstance(row.get(key), float)}
        for key in ("images_per_s", "allocated_mib", "reserved_mib")
    )
    peer = max((value for name, value in speed.items() if parse(name)[0]), default=None)
    for name, row in rows.items():
        library, model, _ = parse(name)
        ratios = [("vs_first", speed, speed.get(next(iter(rows)))), ("vs_peer", speed, None if library else peer)]
        if model.startswith("a_"):
            for key, values in (("vs_default", speed), ("allocated_ratio", allocated), ("reserved_ratio", reserved)):
                ratios.append((key, values, values.get(name.removeprefix("a_"), values.get(model.removeprefix("a_")))))
        row |= {key: values[name] / base for key, values, base in ratios if base and name in values}
