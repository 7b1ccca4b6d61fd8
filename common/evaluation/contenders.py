"""Contenders of a benchmark: a name becomes a model, images for it and a step to run again and again. A name is

    swin_tiny, a_swin_tiny           a model of this project
    timm:NAME, transformers:NAME     one of another library, with fresh weights: nothing is downloaded
    NAME@key=value,...               with options: constructor arguments, or fields of ``Setting`` for this one alone;
                                     for timm also ``fused_attn`` (0 never, 1 as by default, 2 experimental uses, too),
                                     for transformers ``attn_implementation``

All are run and timed alike, as their ``Setting`` says.
"""

import ast
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, fields, replace
from typing import Any

import timm
import torch
import torch.nn.functional as F
from timm.layers import set_fused_attn, use_fused_attn
from torch import Tensor, nn

from ..models.classifier import to_pair
from ..models.hub import compile_options
from ..models.registry import create_model

__all__ = ["COMPILE_MODES", "MODES", "PRECISIONS", "Contender", "Setting", "autocast", "build", "compiled",
           "float32_rule", "make_step", "parse", "quartiles"]  # fmt: skip

MODES = ("inference", "train")
PRECISIONS = ("float32", "tf32", "bf16", "fp16", "bf16-weights")
"""bf16 and fp16 are autocast of float32 weights; ``bf16-weights`` are a model and images of that type."""

COMPILE_MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}
TRANSFORMERS: dict[str, tuple[str, dict[str, Any]]] = {  # names of config and model class, arguments of the config
    "cvt-13": ("Cvt", {}),
    "cvt-21": ("Cvt", {"depth": [1, 4, 16]}),
    "swin-tiny": ("Swin", {"image_size": 224}),
    "swinv2-tiny": ("Swinv2", {"image_size": 256, "window_size": 8}),
}


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What the contenders of one comparison share. ``img_size`` None is each model's own."""

    mode: str = "inference"
    batch_size: int = 128
    img_size: int | None = None
    precision: str = "float32"
    compile: bool = False
    compile_mode: str = "default"
    channels_last: bool = False
    device: str = "cpu"

    def __post_init__(self) -> None:
        for name, choices in (("mode", MODES), ("precision", PRECISIONS), ("compile_mode", COMPILE_MODES)):
            if getattr(self, name) not in choices:
                raise ValueError(f"unknown {name} {getattr(self, name)!r}: choose among {choices}")


@dataclass(eq=False)
class Contender:
    """Something to run again and again: ``step`` treats ``images`` images, 0 for a single module."""

    name: str
    step: Callable[[], Any]
    setting: Setting
    images: int = 0
    row: dict[str, Any] = field(default_factory=dict)
    iterations: int = 1
    seconds: list[float] = field(default_factory=list)  # per step, one entry per round

    def warm_up(self, block_seconds: float) -> None:
        """Run until compiled and settled: for two blocks at least, then until three steps are within 10 %."""
        times = [self.time(1) for _ in range(4)]  # the first ones compile and, with CUDA graphs, record
        while sum(times[1:]) < 2 * block_seconds or (
            max(times[-3:]) > 1.1 * min(times[-3:]) and sum(times[1:]) < 25 * block_seconds
        ):
            times.append(self.time(1))
        self.iterations = max(1, min(1000, math.ceil(block_seconds / statistics.median(times[-3:]))))

    def time(self, iterations: int) -> float:
        """Seconds per step. A single image is waited for each time: latency, not how fast calls can be queued."""
        with float32_rule(self.setting.precision):
            if iterations > 1:
                self.step()
            synchronize(self.setting.device)
            start = time.perf_counter()
            for _ in range(iterations):
                self.step()
                if self.images == 1:
                    synchronize(self.setting.device)
            synchronize(self.setting.device)
            return (time.perf_counter() - start) / iterations

    def result(self) -> dict[str, Any]:
        if not self.seconds:
            return self.row
        low, median, high = quartiles(self.seconds)
        return {**self.row, "images_per_s": self.images / median, "images_per_s_low": self.images / high,
                "images_per_s_high": self.images / low, "ms": 1e3 * median, "rounds": len(self.seconds),
                "iterations": self.iterations}  # fmt: skip


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    points = torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64)
    low, median, high = torch.tensor(values, dtype=torch.float64).quantile(points).tolist()
    return low, median, high


def synchronize(device: str) -> None:
    if torch.device(device).type != "cpu":
        torch.accelerator.synchronize(device)


@contextmanager
def float32_rule(precision: str) -> Iterator[None]:
    """How float32 products are taken: exactly for ``float32``, in TF32 for ``tf32``, else as torch does by default."""
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    torch.backends.cudnn.allow_tf32 = precision != "float32"
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.allow_tf32 = before[1]


def autocast(setting: Setting) -> Any:
    """Entered anew for every step, as by a user: autocast keeps the weights that it has cast until it is left."""
    dtype = AUTOCAST.get(setting.precision)
    return torch.autocast(torch.device(setting.device).type, dtype) if dtype else nullcontext()


# ---- building contenders


def parse(contender: str) -> tuple[str, str, dict[str, Any]]:
    """``library:name@key=value,...`` -> library ("" for ours), name, options; values are Python literals or words."""
    head, _, options = contender.partition("@")
    library, _, name = head.rpartition(":")
    try:
        call: Any = ast.parse(f"dict({options})", mode="eval").body
    except SyntaxError:
        call = None
    if call is None or call.args:
        raise ValueError(f"cannot read the options of {contender!r}: write NAME@key=value,key=value")
    return library, name, {keyword.arg: _literal(keyword.value) for keyword in call.keywords}


def _literal(node: ast.expr) -> Any:
    try:
        return ast.literal_eval(node)
    except ValueError:
        return ast.unparse(node).replace(" ", "")  # a word, such as reduce-overhead


class Logits(nn.Module):
    """A transformers classifier as a function from images to logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return self.model(pixel_values=x).logits


def build(contender: str, setting: Setting) -> tuple[nn.Module, Tensor, Setting]:
    """A model with fresh weights, in eval mode, random images for it, and the setting with the contender's own."""
    library, name, options = parse(contender)
    setting = replace(setting, **{f.name: options.pop(f.name) for f in fields(Setting) if f.name in options})
    size: Any = setting.img_size
    if library == "":
        model: Any = create_model(name, **({"img_size": size} if size else {}), **options)
        size = model.img_size
    elif library == "timm":
        known: Any = timm.get_pretrained_cfg(name, allow_unregistered=False)
        own = known.input_size[-1]
        options |= {"img_size": size} if size and size != own and known.fixed_input_size else {}
        before, fused = (use_fused_attn(), use_fused_attn(experimental=True)), options.pop("fused_attn", None)
        try:
            set_fused_attn(*(before if fused is None else (fused > 0, fused > 1)))
            model, size = timm.create_model(name, **options), size or own
        finally:
            set_fused_attn(*before)
    elif library == "transformers" and name in TRANSFORMERS:
        import transformers

        kind, config = TRANSFORMERS[name]
        attention = {key: options.pop(key) for key in ("attn_implementation",) if key in options}
        size = size or config.get("image_size", 224)
        config = config | ({"image_size": size} if "image_size" in config else {}) | options
        config = getattr(transformers, f"{kind}Config")(num_labels=1000, **config)
        model = Logits(transformers.AutoModelForImageClassification.from_config(config, **attention))
    else:
        raise ValueError(f"unknown contender {contender!r}: give a name of list_models(), timm:NAME, or transformers: "
                         f"with one of {sorted(TRANSFORMERS)}")  # fmt: skip
    dtype = torch.bfloat16 if setting.precision == "bf16-weights" else torch.float32
    layout = torch.channels_last if setting.channels_last else torch.contiguous_format
    x = torch.randn(setting.batch_size, 3, *to_pair(size), device=setting.device)
    return model.eval().to(setting.device, dtype, memory_format=layout), x.to(dtype, memory_format=layout), setting


def compiled(function: Callable[..., Any], setting: Setting) -> Callable[..., Any]:
    """``function``, compiled for fixed shapes if the setting says so, as ``HubModel.compile`` does: all alike."""
    if not setting.compile:
        return function
    dynamo: Any = torch._dynamo.config
    dynamo.recompile_limit, dynamo.fail_on_recompile_limit_hit = 256, True  # else it would go on uncompiled, silently
    faster = torch.compile(function, options=compile_options(setting.compile_mode), dynamic=False)

    def run(*args: Any) -> Any:
        torch.compiler.cudagraph_mark_step_begin()
        return faster(*args)

    return run


def make_step(model: nn.Module, x: Tensor, logits: Tensor, setting: Setting) -> Callable[[], Any]:
    """One forward in inference mode, or one training step: forward, cross entropy, backward, AdamW."""
    model.train(setting.mode == "train")
    run = compiled(model, setting)

    def infer() -> Tensor:
        with torch.inference_mode(), autocast(setting):
            return run(x)

    if setting.mode == "inference":
        return infer
    labels = torch.randint(logits.shape[1], (len(x), *logits.shape[2:]), device=x.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.05, fused=x.is_cuda)
    scaler = torch.amp.GradScaler(x.device.type, enabled=setting.precision == "fp16")

    def train() -> None:
        with autocast(setting):
            loss = F.cross_entropy(run(x), labels)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)

    return train
