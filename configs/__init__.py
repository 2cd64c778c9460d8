"""Configuration: typed sections in, YAML and command line read, validated values out."""

from configs.errors import ConfigError
from configs.resolve import Device, ResolvedConfig, ResolvedSchedulerConfig, resolve
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
    "ModelConfig",
    "ParallelConfig",
    "ResolvedConfig",
    "ResolvedSchedulerConfig",
    "SchedulerConfig",
    "ServerConfig",
    "resolve",
]
