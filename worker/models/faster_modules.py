"""The linear layers inside a transformers model, exchanged for the fastest form there is here."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from worker.models.linear import Linear, make_linear


class _FastLinear(nn.Module):
    """Stands in for `nn.Linear`, over any leading dimensions.

    Modeling code may ask `weight` for its dtype, device and shape. One that computes with it
    gets NaN, which the probe of the model notices: the real weights lie in another order.
    """

    def __init__(self, linear: Linear, weight_OI: Tensor) -> None:
        super().__init__()
        self._linear = linear
        self.out_features, self.in_features = weight_OI.shape
        # No buffer: it is a single number and nothing to be counted or moved.
        self.weight = weight_OI.new_full((), torch.nan).expand(weight_OI.shape)

    def forward(self, x: Tensor) -> Tensor:
        y_tO = self._linear(x.reshape(-1, self.in_features).contiguous())
        return y_tO.view(*x.shape[:-1], self.out_features)


def exchange_linears(model: nn.Module) -> int:
    """Exchange them in place, one at a time; the bytes that they hold by themselves afterwards.

    A tied weight stays with the embedding; the head may hold it once more.
    """
    embedded = {m.weight.data_ptr() for m in model.modules() if isinstance(m, nn.Embedding)}
    held_bytes = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            weight_OI = _weight_of(child)
            if weight_OI is None or weight_OI.device.type != "cpu":
                continue
            linear = make_linear(weight_OI, _bias_of(child))
            setattr(parent, name, _FastLinear(linear, weight_OI))
            if not (linear.shares_weight and weight_OI.data_ptr() in embedded):
                held_bytes += linear.weight_bytes
    return held_bytes


def _weight_of(module: nn.Module) -> Tensor | None:
    """Exactly these classes: a subclass does something else besides."""
    if type(module) is nn.Linear:
        return module.weight.detach()
    if type(module) is Conv1D:
        return module.weight.detach().T
    return None


def _bias_of(module: Any) -> Tensor | None:
    return None if module.bias is None else module.bias.detach()
