"""Over how many workers an engine is spread, and which of that outlives its supervisor."""

import json
from dataclasses import dataclass

from cluster.engine_spec import EngineSpec
from configs import Config, ParallelConfig


@dataclass(frozen=True, slots=True)
class Shape:
    tensor_parallel_size: int
    pipeline_parallel_size: int

    @classmethod
    def of(cls, parallel: ParallelConfig) -> "Shape":
        return cls(parallel.tensor_parallel_size, parallel.pipeline_parallel_size)

    def __str__(self) -> str:
        return f"TP {self.tensor_parallel_size} x PP {self.pipeline_parallel_size}"

    def applied(self, config: Config) -> Config:
        """`config` with this shape; raises ConfigError if that cannot be."""
        sizes = {
            "tensor_parallel_size": self.tensor_parallel_size,
            "pipeline_parallel_size": self.pipeline_parallel_size,
        }
        parallel = config.parallel.model_copy(update=sizes)
        return config.model_copy(update={"parallel": parallel})


class ShapeMemory:
    """What an application was scaled to, kept in Ray's control store: there it outlives the
    supervisor, every replica, and the machine that they were on.

    It belongs to one deployment. All methods ask the control store and wait for its answer.
    """

    def __init__(self, app: str) -> None:
        self._key = f"palimpsest:shape:{app}"

    def keep(self, spec: EngineSpec, shape: Shape) -> None:
        """From now on an engine for `spec`, or for the same configuration deployed earlier, has
        `shape`."""
        from ray.experimental.internal_kv import _internal_kv_put

        note = {
            "fingerprint": spec.fingerprint,
            "deployed_seconds": spec.deployed_seconds,
            "sizes": [shape.tensor_parallel_size, shape.pipeline_parallel_size],
        }
        _internal_kv_put(self._key, json.dumps(note))

    def recall(self, spec: EngineSpec) -> Shape | None:
        """None: `spec` was not scaled, or has been deployed anew since."""
        from ray.experimental.internal_kv import _internal_kv_get

        data = _internal_kv_get(self._key)
        if data is None:
            return None
        note = json.loads(data)
        is_of_spec = note["fingerprint"] == spec.fingerprint
        if not is_of_spec or note["deployed_seconds"] < spec.deployed_seconds:
            return None
        return Shape(*note["sizes"])

    def forget(self) -> None:
        from ray.experimental.internal_kv import _internal_kv_del

        _internal_kv_del(self._key)
