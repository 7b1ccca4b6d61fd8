"""Measure models side by side: speed, peak memory, parameters, FLOPs and kernels; and modules call by call.

Contenders run in rounds, each for a few steps per round and in alternating order, so that a clock that drifts or a
neighbour on the machine meets all alike; a speed is the median over rounds, its spread the quartiles. A contender is

    swin_tiny, a_swin_tiny           a model of this project
    timm:NAME, transformers:NAME     one of another library, with fresh weights: nothing is downloaded
    NAME@key=value,...               with options: constructor arguments, or fields of ``Setting`` for this one alone;
                                     for timm also ``fused_attn`` (0 never, 1 as by default, 2 experimental uses, too),
                                     for transformers ``attn_implementation``

A contender that fails is reported with its error; the others go on.
"""

import ast
import gc
import importlib.metadata
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from typing import Any

import timm
import torch
import torch.nn.functional as F
from timm.layers import set_fused_attn, use_fused_attn
from torch import Tensor, nn
from torch.autograd import DeviceType
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode
from tqdm.auto import tqdm

from ..models.classifier import Classifier, to_pair
from ..models.hub import compile_options
from ..models.registry import create_model

__all__ = ["COMPILE_MODES", "MODES", "PRECISIONS", "Setting", "benchmark", "benchmark_modules", "build", "environment"]

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


# ---- what is measured besides time


def count_flops(model: nn.Module, x: Tensor) -> tuple[Tensor, float]:
    """Logits of one image and its 10^9 FLOPs as torch counts: products and convolutions, 2 per multiply and add."""
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        logits = model(x)
    return logits, counter.get_total_flops() / 1e9


def memory(device: str) -> tuple[int, int]:
    """Bytes allocated and reserved on a GPU, after what is free has been given back."""
    if torch.device(device).type != "cuda":
        return 0, 0
    gc.collect()
    torch.ones(8, 8, device=device) @ torch.ones(8, 8, device=device)  # cuBLAS takes its workspace once, for all
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)


def peak_memory(contender: Contender, before: tuple[int, int]) -> dict[str, Any]:
    """Peaks of one step, weights and optimiser included, less what was there before the model was built."""
    device = contender.setting.device
    if torch.device(device).type != "cuda":
        return {"allocated_mib": "not measured", "reserved_mib": "not measured"}
    memory(device)
    torch.cuda.reset_peak_memory_stats(device)
    contender.time(1)
    peaks = torch.cuda.max_memory_allocated(device) - before[0], torch.cuda.max_memory_reserved(device) - before[1]
    return {"allocated_mib": peaks[0] / 2**20, "reserved_mib": peaks[1] / 2**20}


def count_kernels(contender: Contender, top: int = 15) -> dict[str, Any]:
    """Kernels of one step and their GPU time by name; on a CPU, operators and the time spent in themselves."""
    cuda = torch.device(contender.setting.device).type == "cuda"
    with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]) as profiler:
        contender.time(1)
    events = sorted((
        (event.self_device_time_total if cuda else event.self_cpu_time_total, event.count, event.key)
        for event in profiler.key_averages()
        if (event.device_type == DeviceType.CUDA if cuda else event.key.startswith("aten::"))
        and not event.is_user_annotation  # a span that covers kernels
    ), reverse=True)  # fmt: skip
    largest = [{"kernel": key, "calls": count, "ms": us / 1e3} for us, count, key in events[:top]]
    return {"kernels": sum(count for _, count, _ in events), "kernel_ms": sum(us for us, _, _ in events) / 1e3,
            "top_kernels": largest}  # fmt: skip


def environment(device: str) -> dict[str, Any]:
    cuda = torch.device(device).type == "cuda"
    name = torch.cuda.get_device_name(device) if cuda else f"{device}, {torch.get_num_threads()} threads"
    installed = {dist.metadata["Name"]: dist.version for dist in importlib.metadata.distributions()}
    peers = {library: installed.get(library) for library in ("timm", "transformers", "triton")}
    return {"device": name, "torch": torch.__version__, "cuda": torch.version.cuda if cuda else None, **peers}


# ---- comparing


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
                raise TimeoutError("not run, the time was used up before")
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


# ---- modules

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
    offset: Callable[[str], Any] = lambda name: part(name) and part(name).offset  # noqa: E731
    stages = part("layers") or part("stages")
    last = [stage.blocks[-1] for stage in stages]
    ready = [part("merge_anchor").weights] if part("merge_anchor") and model.canonical else []  # else a part of offset
    groups: dict[str, list[list[Any]]] = {
        "canonical place": [[model.canonicalize.place]],
        "tokenization": [
            [offset("token_anchor")],
            [part("patch_embed"), *(getattr(s, "embed", None) for s in stages)],
        ],
        "window selection": [[part("window_anchor") and part("window_anchor").beside]],  # which offset calls, too
        "pooling selection": [[offset("projection_anchor") or offset("pool_anchor")]],
        "patch merging": [ready, [offset("merge_anchor")], [getattr(stage, "downsample", None) for stage in stages]],
        "relative positions": [
            [getattr(b.attn, name, None) for b in last for name in ("position_bias", "with_positions")]
        ],
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
