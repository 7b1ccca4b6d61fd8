"""The fixed numbers of an anchor: random, unlike anything a model learns, the same for all models."""

import torch
from torch import Tensor

from ..ops.weights import product
from ..seeding import drawn
from .identity import NoAnchor
from .scores import find_score

__all__ = ["Fixed"]


class Fixed(NoAnchor):
    """The score, and what breaks its ties: a direction in the space of channels, and weights of the places in a window.

    ``sketch=r`` scores r fixed random combinations of a layer's D outputs instead of all: still a shift-invariant
    function, so still exact; 0 is the paper's.
    """

    direction: Tensor
    directions: Tensor
    window_weights: Tensor
    zeros: Tensor

    def __init__(self, *, score: str = "signed", sketch: int = 0) -> None:
        super().__init__()
        self.score = find_score(score)
        self.sketch = sketch if self.score.needs_layer else 0
        place, device = torch.arange(4096, dtype=torch.float64, device="cpu"), torch.get_default_device()
        direction = torch.sin(1.0 + 12.9898 * place).float()  # the same bits for all: no other device computes them
        self.register_buffer("direction", direction.to(device), persistent=False)
        uneven = 1 + self.score.tie_break * torch.sin(2 + 7.31 * place)
        self.register_buffer("window_weights", uneven.float().to(device), persistent=False)
        self.register_buffer("zeros", torch.zeros(64), persistent=False)
        if self.sketch:
            (directions,) = drawn(torch.randn, sketch, 4096, dtype=torch.float32)
            self.register_buffer("directions", directions, persistent=False)

    def combined(self, weight: Tensor) -> Tensor:
        """Rows (D, ...) of the linear map whose output is scored, or their r fixed combinations (r, ...)."""
        rows = len(weight)
        if not self.sketch or rows <= self.sketch:
            return weight
        return product(self.directions[:, :rows].to(weight), weight.reshape(rows, -1)).view(-1, *weight.shape[1:])

    @property
    def signed(self) -> bool:
        return self.score.tie_break > 0

    def extra_repr(self) -> str:
        return f"score={self.score.name!r}, sketch={self.sketch}"
