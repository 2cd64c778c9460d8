"""Finding out by trying whether a model can run over a flat batch, and with what shapes.

With an attention that mixes nothing (each token gets its own v), a model whose tokens meet in
attention alone treats every token by itself. Recurrent states, convolutions over time and
attention that goes round our function break that, and are caught here.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from worker.models.base import Attend
from worker.models.errors import UnsupportedModelError

_TOLERANCE = 0.01
"""Of the largest value; far above rounding in bfloat16, far below another token's influence."""


@dataclass(frozen=True, slots=True)
class ProbedShape:
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    vocab_size: int
    windows: tuple[int | None, ...]


class Probed(Protocol):
    """What is needed of a decoder to probe it; as in `worker.models.base.Decoder`."""

    def embed(self, token_ids_t: Tensor) -> Tensor: ...

    def layers(self, hidden_tE: Tensor, position_ids_t: Tensor, attend: Attend) -> Tensor: ...

    def logits(self, hidden_sE: Tensor) -> Tensor: ...


def probe(decoder: Probed, num_layers: int, device: torch.device, name: str) -> ProbedShape:
    """Run two tokens through `decoder` twice, changing only the first of them.

    Raises UnsupportedModelError where the second is not left alone, or where not each layer
    has attended once, all with the same shapes. `name` is what the messages call the model.
    """
    recorder = _Recorder()
    with torch.inference_mode():
        positions_t = torch.arange(2, device=device)
        seconds = []
        for first_id in (0, 1):
            hidden_tE = decoder.embed(torch.tensor([first_id, 2], device=device))
            hidden_tE = decoder.layers(hidden_tE, positions_t, recorder)
            seconds.append(hidden_tE[1].float())
        vocab_size = _vocab_size(decoder, hidden_tE[:1], name)
    shapes = set(recorder.shapes.values())
    if sorted(recorder.shapes) != list(range(num_layers)) or recorder.num_calls != 2 * num_layers:
        raise UnsupportedModelError(
            f"{name} has {num_layers} layers, but {len(recorder.shapes)} of them attend through "
            f"transformers' attention interface; all must, or their KV cannot be paged."
        )
    if len(shapes) > 1:
        raise UnsupportedModelError(
            f"{name} has layers with different heads ({sorted(shapes)}: query heads, KV heads, "
            f"width); one block can only hold layers that are alike."
        )
    if not torch.allclose(*seconds, rtol=0, atol=_TOLERANCE * seconds[0].abs().max().item()):
        raise UnsupportedModelError(
            f"{name} carries something from token to token besides attention (a recurrent state "
            f"or a convolution), which the KV cache does not hold."
        )
    num_heads, num_kv_heads, head_dim = shapes.pop()
    return ProbedShape(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        hidden_size=hidden_tE.shape[-1],
        vocab_size=vocab_size,
        windows=tuple(recorder.windows[layer] for layer in range(num_layers)),
    )


def _vocab_size(decoder: Probed, hidden_sE: Tensor, name: str) -> int:
    try:
        return decoder.logits(hidden_sE).shape[-1]
    except AttributeError as error:
        raise UnsupportedModelError(
            f"The head of {name} reaches into its base model ({error}), so it cannot run on the "
            f"sampled rows alone."
        ) from error


class _Recorder:
    """An `Attend` that mixes nothing and remembers how it was called."""

    def __init__(self) -> None:
        self.shapes: dict[int, tuple[int, int, int]] = {}
        self.windows: dict[int, int | None] = {}
        self.num_calls = 0

    def __call__(
        self,
        layer: int,
        q_tHD: Tensor,
        k_tGD: Tensor,
        v_tGD: Tensor,
        *,
        scale: float | None = None,
        window: int | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        _, num_heads, head_dim = q_tHD.shape
        num_kv_heads = k_tGD.shape[1]
        if k_tGD.shape != v_tGD.shape or k_tGD.shape[2] != head_dim:
            raise UnsupportedModelError(
                f"Layer {layer} has keys of {list(k_tGD.shape[1:])} and values of "
                f"{list(v_tGD.shape[1:])} (heads, width); they must be alike to be paged."
            )
        self.num_calls += 1
        self.shapes[layer] = (num_heads, num_kv_heads, head_dim)
        self.windows[layer] = window
        return v_tGD.repeat_interleave(num_heads // num_kv_heads, dim=1)
