"""RMSNorm over the hidden state and over single heads. Shape letters as in `base`."""

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Norm:
    weight_E: Tensor
    epsilon: float

    def __call__(self, x_tE: Tensor) -> Tensor:
        return F.rms_norm(x_tE, self.weight_E.shape, self.weight_E, self.epsilon)


@dataclass(frozen=True, slots=True)
class HeadNorm:
    """Of q and of k in one go: each of the N = H + G heads has weights of its own."""

    weight_ND: Tensor
    """float32 in every dtype of the model."""
    epsilon: float

    def __call__(self, x_tND: Tensor) -> Tensor:
        normed_tND = F.rms_norm(x_tND.float(), x_tND.shape[-1:], None, self.epsilon)
        return (normed_tND * self.weight_ND).to(x_tND.dtype)
