"""Time the modules of models call by call, each with what one forward gave it."""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from ..models.classifier import Classifier
from .benchmark import describe, race, reset
from .contenders import Contender, Setting, autocast, build, compiled, float32_rule, quartiles

__all__ = ["benchmark_modules", "module_calls"]

Call = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]


def benchmark_modules(models: Sequence[str], setting: Setting, *, rounds: int = 20, block_seconds: float = 0.05,
                      deadline: float = math.inf) -> dict[str, Any]:  # fmt: skip
    """Milliseconds per call of modules in one forward of each of our ``models``, all interleaved, as ``benchmark``.

    An anchor counts with the strided operation that it serves: "tokenization" of an adaptive model is anchor and
    embedding. Rows are modules, numbered where a forward calls several; columns are the models.
    """
    reset(setting)
    contenders: list[Contender] = []
    labels: dict[str, list[str]] = {}
    for name in models:
        model, x, own = build(name, setting)
        if own.mode != "inference":
            raise ValueError(f"modules are timed in inference, not in mode {own.mode!r}: leave it out")
        if not isinstance(model, Classifier):
            raise ValueError(f"{name}: modules are known for the models of list_models() alone")
        calls = module_calls(model, x, own)
        labels[name] = list(calls)
        contenders += [Contender(f"{label}|{name}", replay(calls[label], own), own) for label in calls]
    for contender in tqdm(contenders, desc="prepare", leave=False, disable=None):
        try:
            contender.warm_up(block_seconds)
        except Exception as error:
            contender.row["error"] = describe(error)
    note = race(contenders, rounds, deadline)
    modules = dict.fromkeys(label for known in sorted(labels.values(), key=len, reverse=True) for label in known)
    rows: dict[str, dict[str, Any]] = {label: {"module": label, **dict.fromkeys(labels)} for label in modules}
    for contender in contenders:
        label, name = contender.name.split("|")
        ms = 1e3 * quartiles(contender.seconds)[1] if contender.seconds else None
        rows[label][name] = contender.row.get("error", ms)
    contenders.clear()
    reset(setting)
    return {"setting": asdict(setting), "rows": list(rows.values()), "note": note}


def module_calls(model: Classifier, x: Tensor, setting: Setting) -> dict[str, list[Call]]:
    """The calls that modules of interest get in one forward, those of an anchor and of what it serves together."""
    part: Callable[[str], Any] = lambda name: getattr(model, name, None)  # noqa: E731
    offset: Callable[[str], Any] = lambda name: getattr(part(name), "choose", None)  # noqa: E731
    stages = part("layers") or part("stages")
    last = [stage.blocks[-1] for stage in stages]
    groups: dict[str, list[list[Any]]] = {
        "canonical place": [[model.canonicalize.place]],
        "tokenization": [
            [offset("token_anchor")],
            [part("patch_embed"), *(getattr(s, "embed", None) for s in stages)],
        ],
        "window selection": [[offset("window_anchor")]],
        "pooling selection": [[offset("projection_anchor") or offset("pool_anchor")]],
        "patch merging": [[getattr(stage, "downsample", None) for stage in stages]],
        "relative positions": [[getattr(block.attn, "with_positions", None) for block in last]],
        "attention": [[block.attn for block in last]],
        "block": [last],
    }
    calls: dict[str, list[list[Call]]] = {label: [[] for _ in kinds] for label, kinds in groups.items()}
    restore = [
        record(target, calls[label][i])
        for label, kinds in groups.items()
        for i, targets in enumerate(kinds)
        for target in targets
        if target is not None and not isinstance(target, nn.Identity)
    ]
    try:
        with torch.inference_mode(), autocast(setting), float32_rule(setting.precision):
            model(x)
    finally:
        for undo in restore:
            undo()
    result = {}
    for label, kinds in calls.items():
        count = max(map(len, kinds))
        for i in range(count):
            result[f"{label} {i + 1}" if count > 1 else label] = [kind[i] for kind in kinds if i < len(kind)]
    return result


def record(target: Any, calls: list[Call]) -> Callable[[], None]:
    """Let a module, or a method of one, note its calls until the function that is returned is called."""
    owner, name = (target, "forward") if isinstance(target, nn.Module) else (target.__self__, target.__name__)
    original = getattr(owner, name)

    def noted(*args: Any, **kwargs: Any) -> Any:
        calls.append((target, args, kwargs))
        return original(*args, **kwargs)

    setattr(owner, name, noted)
    return partial(delattr, owner, name)


def replay(calls: list[Call], setting: Setting) -> Callable[[], Any]:
    run = compiled(lambda: [function(*args, **kwargs) for function, args, kwargs in calls], setting)

    def step() -> Any:
        with torch.inference_mode(), autocast(setting):
            return run()

    return step
