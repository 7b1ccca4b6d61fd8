"""The head of a model with a class token."""

from timm.layers import trunc_normal_
from torch import Tensor, nn

__all__ = ["ClassTokenHead"]


class ClassTokenHead(nn.Module):
    """Linear classifier of the class token: (B, 1 + tokens, C) -> (B, num_classes)."""

    def __init__(self, *, dim: int, num_classes: int, drop_rate: float) -> None:
        super().__init__()
        self.in_features = dim
        self.drop = nn.Dropout(drop_rate)
        self.fc = nn.Linear(dim, num_classes) if num_classes else nn.Identity()

    def reset(self, num_classes: int, global_pool: str | None = None) -> None:
        """Replace the classifier; ``num_classes=0`` leaves the class token."""
        if global_pool not in (None, "token"):
            raise ValueError(f"CvT classifies from its class token: global_pool is 'token', got {global_pool!r}")
        like = next(self.fc.parameters(), None)
        self.fc = nn.Linear(self.in_features, num_classes) if num_classes else nn.Identity()
        if num_classes:
            trunc_normal_(self.fc.weight, std=0.02)
            nn.init.zeros_(self.fc.bias)  # type: ignore[arg-type]
        if like is not None:
            self.fc.to(like)

    def forward(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        x = self.drop(x[:, 0])
        return x if pre_logits else self.fc(x)
