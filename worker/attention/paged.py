"""The `Attend` that a model is called with: one backend, one cache, one plan."""

from torch import Tensor

from worker.attention.base import AttentionBackend, AttentionBatch, AttentionRule
from worker.kv_cache import KVCache


class PagedAttend:
    """Bound to one plan; see `worker.models.base.Attend`."""

    def __init__(self, backend: AttentionBackend, cache: KVCache, batch: AttentionBatch) -> None:
        self._backend = backend
        self._cache = cache
        self._batch = batch

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
        rule = AttentionRule(q_tHD.shape[-1] ** -0.5 if scale is None else scale, window, softcap)
        return self._backend.attend(
            q_tHD, k_tGD, v_tGD, self._cache.layers[layer], self._batch, rule
        )
