"""Windows on a grid of tokens, for Swin and SwinV2: relative positions, shifts, the mask."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = [
    "in_whole_windows",
    "relative_position_index",
    "shifted_window_mask",
    "window_shift",
]


def relative_position_index(window: tuple[int, int]) -> Tensor:
    """(tokens, tokens) rows, for the place of token i relative to token j, in a table of all relative positions."""
    grid = torch.stack(torch.meshgrid(*(torch.arange(side) for side in window), indexing="ij"), -1).flatten(0, 1)
    relative = grid[:, None] - grid[None, :] + torch.tensor(window) - 1
    return relative[..., 0] * (2 * window[1] - 1) + relative[..., 1]


def window_shift(size: tuple[int, int], window: tuple[int, int]) -> tuple[int, int]:
    """By how much shifted windows move: half a window, but not at all on an axis that is a single window."""
    shift_h, shift_w = (0 if side <= w else w // 2 for side, w in zip(size, window, strict=True))
    return shift_h, shift_w


def shifted_window_mask(size: tuple[int, int], window: tuple[int, int], shift: tuple[int, int],
                        device: torch.device) -> Tensor | None:  # fmt: skip
    """(windows, tokens, tokens), -100 where two tokens of a shifted window come from opposite edges of the array.

    None where nothing is shifted. ``size`` is rounded up to whole windows, as ``in_whole_windows`` pads.
    """
    if not any(shift):
        return None
    bands = []
    for side, w, s in zip(size, window, shift, strict=True):
        i = torch.arange(side + -side % w, device=device)
        band = (i >= len(i) - w).long() + (i >= len(i) - s).long() if s else torch.zeros_like(i)
        bands.append(band.view(-1, w))  # of each row of windows, or column of them
    region = 3 * bands[0][:, None, :, None] + bands[1][None, :, None, :]
    region = region.flatten(2).flatten(0, 1)  # windows, tokens
    return (region[:, :, None] != region[:, None, :]) * -100.0


def in_whole_windows(attention: Callable[..., Tensor], x: Tensor, window: tuple[int, int], *args: Any) -> Tensor:
    """``attention(x, ...)`` for (B, H, W, C); sides that are no multiple of the window are zero-padded and cropped.

    Shifted windows are shifted after that, as in Swin's detector and in transformers. timm shifts first."""
    height, width = x.shape[1:3]
    pad_h, pad_w = (-side % w for side, w in zip((height, width), window, strict=True))
    if not (pad_h or pad_w):
        return attention(x, *args)
    return attention(F.pad(x, (0, 0, 0, pad_w, 0, pad_h)), *args)[:, :height, :width]
