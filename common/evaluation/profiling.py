"""What is measured of a contender besides time: FLOPs, peak memory, kernels; and the machine it ran on."""

import gc
import importlib.metadata
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import DeviceType
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from .contenders import Contender

__all__ = ["count_flops", "count_kernels", "environment", "memory", "peak_memory"]


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
