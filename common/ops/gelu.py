"""x Phi(x), with Phi the normal distribution."""

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import kernels
from .dispatch import forwards, op

__all__ = ["gelu"]


class _Gelu(torch.autograd.Function):
    """GELU whose backward is a few passes: torch's own takes two to four times as long on a CPU."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return F.gelu(x)

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        """Phi(x) + x phi(x), times the gradient."""
        (x,) = ctx.saved_tensors
        density = torch.exp(-0.5 * x.square()) * (0.5 / torch.pi) ** 0.5
        return grad * (0.5 * (1 + torch.erf(x * 0.5**0.5)) + x * density)


@op(kernel=kernels.gelu, fits=kernels.fits_gelu_kernel)
def gelu(x: Tensor) -> Tensor:
    """GELU. The kernel differs by less than is rounded off."""
    learns = x.requires_grad and x.device.type == "cpu" and x.dtype == torch.float32 and not forwards()
    return _Gelu.apply(x) if learns else F.gelu(x)
