"""What kernels have to know of a card. They were tuned on one with 227 KB of shared memory for a program; most cards
have less, and a program that needs more than the card has cannot be launched."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["OLDEST", "TUNED", "Card", "assumed", "card_of", "first_tile", "holds", "needed", "refused", "runs",
           "smaller", "tuned"]  # fmt: skip

OLDEST = 75  # capability: before, Triton has no compiler
AMPERE, HOPPER = 80, 90  # capabilities: the first with bf16 and with loads on their way, and with those it was tuned by
TUNED = 232_448  # bytes: where a program may have as many, every kernel that was tuned runs as it was


class Card(NamedTuple):
    """A device, as kernels see it: compute capability times ten, bytes of shared memory that a program may ask for, and
    threads of a warp."""

    name: str
    capability: int
    memory: int
    warp: int = 32

    @property
    def bf16(self) -> bool:
        """Whether it computes in bfloat16 itself."""
        return self.capability >= AMPERE


NONE = Card("no GPU", HOPPER, TUNED)  # an interpreter, or a graph that is traced for a GPU elsewhere: no limits
_CARDS: dict[int, Card] = {}
_ASSUMED: Card | None = None
_REFUSED: dict[str, tuple[int, int]] = {}
_SMALLER: dict[str, tuple[int, int]] = {}


def card_of(device: torch.device) -> Card:
    """The card that a device is."""
    return _card(device.type, device.index)


def _card(kind: str, index: int | None) -> Card:
    if _ASSUMED is not None:
        return _ASSUMED
    if kind != "cuda":
        return NONE
    index = torch.cuda.current_device() if index is None else index
    if index not in _CARDS:
        found = torch.cuda.get_device_properties(index)
        memory = getattr(found, "shared_memory_per_block_optin", 0) or found.shared_memory_per_block
        capability = 10 * found.major + found.minor
        _CARDS[index] = Card(found.name, capability, memory, getattr(found, "warp_size", 32))
    return _CARDS[index]


@contextmanager
def assumed(card: Card) -> Iterator[None]:
    """Decide as on another card: to see what would run there, or to try it here."""
    global _ASSUMED
    before, _ASSUMED = _ASSUMED, card
    try:
        yield
    finally:
        _ASSUMED = before


def runs(x: Tensor, bf16: bool = True) -> bool:
    """Whether the card where x lies runs kernels: all of them or, not ``bf16``, those in other types."""
    return _runs(x.device.type, x.device.index, bf16)


@torch.compiler.assume_constant_result  # a card does not change: graphs need not check it
def _runs(kind: str, index: int | None, bf16: bool) -> bool:
    return _card(kind, index).capability >= (AMPERE if bf16 else OLDEST)


def tuned(x: Tensor) -> bool:
    """Whether kernels were tuned and run on a card like that where x lies."""
    return _tuned(x.device.type, x.device.index)


@torch.compiler.assume_constant_result
def _tuned(kind: str, index: int | None) -> bool:
    return _card(kind, index).memory >= TUNED


def holds(x: Tensor, kernel: str, held: int, staged: int = 0, stages: int = 1) -> bool:
    """Whether a program of a kernel has room beside a processor of the card where x lies: for ``held`` bytes throughout
    and ``staged`` bytes for each of so many ``stages`` of a loop, all in half precision.

    Compilers decide what is held, by the card: from Hopper on, the stages that are asked for; on Ampere and Ada one
    fewer; before, a single one, in float32 at worst. Where kernels were tuned, they run as they are.
    """
    return first_tile(x, kernel, (held, staged, stages)) == 0


def first_tile(x: Tensor, kernel: str, *tiles: tuple[int, ...]) -> int:
    """Which of a kernel's tiles is the first that has room, by the memory that each takes (``holds``); -1: none has.
    The first is the one that was tuned."""
    return _first_tile(x.device.type, x.device.index, kernel, tiles)


@torch.compiler.assume_constant_result
def _first_tile(kind: str, index: int | None, kernel: str, tiles: tuple[tuple[int, ...], ...]) -> int:
    card = _card(kind, index)
    if card.memory >= TUNED:
        return 0
    needs = [needed(card.capability, *tile) for tile in tiles]
    first = next((i for i, need in enumerate(needs) if need <= card.memory), -1)
    if first < 0:
        _REFUSED[kernel] = needs[-1], card.memory
    elif first > 0:
        _SMALLER[kernel] = needs[first], card.memory
    return first


def needed(capability: int, held: int, staged: int = 0, stages: int = 1) -> int:
    """Bytes that a program takes at most: see ``holds``."""
    if capability < AMPERE:
        return 2 * (held + staged)
    return held + staged * (stages if capability >= HOPPER else max(1, stages - 1))


def refused() -> dict[str, tuple[int, int]]:
    """Kernels that did not fit a card so far: the bytes that each would take, and those that there are."""
    return dict(_REFUSED)


def smaller() -> dict[str, tuple[int, int]]:
    """Kernels that run with a smaller tile than was tuned: the bytes that each takes at most, and those that there
    are."""
    return dict(_SMALLER)
