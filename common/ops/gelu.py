"""x Phi(x), with Phi the normal distribution."""

import torch.nn.functional as F
from torch import Tensor

from .. import kernels
from .dispatch import op

__all__ = ["gelu"]


@op(kernel=kernels.gelu, fits=kernels.fits_gelu_kernel)
def gelu(x: Tensor) -> Tensor:
    """GELU. The kernel differs by less than is rounded off."""
    return F.gelu(x)
