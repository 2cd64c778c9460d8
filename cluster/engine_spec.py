"""What an engine is made from, as it travels from the application to the supervisor."""

import hashlib
import secrets
import time
from dataclasses import dataclass, field

from configs import Config, ServerConfig

_LOADER = "worker.member:load_rank"

# What of `server` an engine reads. The rest is the ingress's own affair, and holds keys.
_SERVER_SETTINGS = (
    "drain_seconds",
    "group_start_seconds",
    "log_format",
    "log_level",
    "step_deadline_seconds",
)
# Not worth another engine: its processes take them up when they start.
_OF_NO_WEIGHT = {"server": {"log_format", "log_level"}}


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """A configuration without keys, and when it was deployed. Survives pickling."""

    config: Config
    deployed_seconds: float
    """Of two specs for one application the later one holds."""
    loader: str = field(default=_LOADER)
    """The `worker.actor.RankLoader` of the workers, as `module:function`."""

    @classmethod
    def of(cls, config: Config, *, loader: str = _LOADER) -> "EngineSpec":
        """The engine that `config` asks for, deployed now."""
        cache = config.cache
        if cache.hash == "auto":
            safe = len(config.server.api_keys) > 1
            cache = cache.model_copy(update={"hash": "sha256" if safe else "xxh3_128"})
        server = ServerConfig(**{name: getattr(config.server, name) for name in _SERVER_SETTINGS})
        keyless = config.model_copy(update={"cache": cache, "server": server})
        return cls(keyless, time.time(), loader)

    @property
    def fingerprint(self) -> str:
        """The same for specs that lead to the same engine."""
        text = f"{self.loader} {self.config.model_dump_json(exclude=_OF_NO_WEIGHT)}"
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def with_hash_seed(config: Config) -> Config:
    """Drawn once per engine, so that nobody outside can know which contents collide."""
    if config.cache.hash_seed is not None:
        return config
    cache = config.cache.model_copy(update={"hash_seed": secrets.randbits(64)})
    return config.model_copy(update={"cache": cache})
