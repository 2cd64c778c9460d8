"""Configuration: typed sections in, YAML and command line read, validated values out."""

from configs.errors import ConfigError
from configs.load import LoadedConfig, load
from configs.resolve import (
    Device,
    ResolvedCacheConfig,
    ResolvedConfig,
    ResolvedSchedulerConfig,
    check,
    resolve,
)
from configs.sections import (
    CacheConfig,
    Config,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    ServerConfig,
)

__all__ = [
    "CacheConfig",
    "Config",
    "ConfigError",
    "Device",
    "LoadedConfig",
    "ModelConfig",
    "ParallelConfig",
    "ResolvedCacheConfig",
    "ResolvedConfig",
    "ResolvedSchedulerConfig",
    "SchedulerConfig",
    "ServerConfig",
    "check",
    "load",
    "resolve",
]
