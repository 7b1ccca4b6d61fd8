"""Random numbers by index: what happens to image i in epoch e is a function of (seed, e, i) and of nothing else, so
that it does not depend on batch size, number of processes, workers, or where a run was interrupted."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache, wraps
from typing import Any, ParamSpec

import numpy as np
import torch
from torch import Tensor

__all__ = ["constants", "derive_seed", "drawn", "hashed_uniform", "kept", "seeded"]

P = ParamSpec("P")
GAMMA = 0x9E3779B97F4A7C15  # of splitmix64: 2^64 over the golden ratio


def kept(count: int) -> Callable[[Callable[P, Tensor]], Callable[P, Tensor]]:
    """Keep the last tensors that a function has made, each for its arguments: also for a gradient, if they are made in
    inference mode, and not what ``torch.export`` traces with, which has no values."""

    def decorate(make: Callable[P, Tensor]) -> Callable[P, Tensor]:
        remembered: Any = lru_cache(maxsize=count)(make)

        @wraps(make)
        def found(*args: P.args, **kwargs: P.kwargs) -> Tensor:
            with torch.inference_mode(False):
                tensor = remembered(*args, **kwargs)
            if type(tensor) is not Tensor:
                remembered.cache_clear()
            return tensor

        return found

    return decorate


@kept(64)
def constants(values: tuple[float, ...], device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    """Numbers as a tensor, copied to a device once: every such copy waits until a GPU has done all that it was given,
    and in a training loop the GPU then waits for the next step."""
    return torch.tensor(values, device=device, dtype=dtype)


def drawn(draw: Callable[..., Tensor], *args: Any, times: int = 1, **kwargs: Any) -> list[Tensor]:
    """The first random numbers that a function of torch draws after a fixed seed, the same on every default device: a
    generator of the CPU draws for no other."""
    generator, device = torch.Generator("cpu").manual_seed(2024), torch.get_default_device()
    return [draw(*args, generator=generator, device="cpu", **kwargs).to(device) for _ in range(times)]


def _mix(z: Tensor) -> Tensor:
    """The finaliser of splitmix64 on int64 tensors (products wrap around, shifts are logical)."""
    z = (z ^ ((z >> 30) & ((1 << 34) - 1))) * -4658895280553007687  # 0xBF58476D1CE4E5B9
    z = (z ^ ((z >> 27) & ((1 << 37) - 1))) * -7723592293110705685  # 0x94D049BB133111EB
    return z ^ ((z >> 31) & ((1 << 33) - 1))


def _key(*seeds: int) -> int:
    """The hash of several numbers, below 2^64, in Python's integers: on a GPU each step of it would be a launch."""
    key = 0
    for seed in seeds:
        z = (key + seed + GAMMA) % 2**64
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
        key = z ^ (z >> 31)
    return key


def hashed_uniform(index: Tensor, columns: int, *seeds: int) -> Tensor:
    """(N,) integers -> (N, columns) numbers in [0, 1), float64; row i depends on ``index[i]`` and ``seeds`` only."""
    key = (_key(*seeds) + 2**63) % 2**64 - 2**63  # as int64 has it
    column = torch.arange(1, columns + 1, device=index.device)
    z = _mix(_mix(index.long()[:, None] + key) + column * (GAMMA - 2**64))
    if index.device.type == "mps":  # has no float64
        return ((z >> 40) & ((1 << 24) - 1)).float() * 2.0**-24
    return ((z >> 11) & ((1 << 53) - 1)).double() * 2.0**-53


def derive_seed(*seeds: int) -> int:
    """One seed below 2^31 for a library's generator out of several numbers: ``hashed_uniform`` of index 0."""
    return _key(*seeds, -GAMMA, 0) >> 33  # index 0 as it is, then the first column


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed the generators of Python, numpy and torch (CPU) inside, for libraries that draw from them; restore after."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
