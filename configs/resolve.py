"""From what was configured to what holds: fills in the defaults that depend on something."""

import ipaddress
from typing import Literal, TypeAlias, get_args

from pydantic import ByteSize

from configs.errors import ConfigError
from configs.sections import (
    CacheConfig,
    Config,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    ServerConfig,
)

Device: TypeAlias = Literal["cpu", "cuda"]

MAX_NUM_SEQS: dict[Device, int] = {"cpu": 64, "cuda": 256}
MAX_NUM_BATCHED_TOKENS: dict[Device, int] = {"cpu": 512, "cuda": 8192}
CPU_KV_CACHE_MEMORY = ByteSize(1 << 30)


class ResolvedCacheConfig(CacheConfig):
    """`hash` is decided. Still open: `num_blocks` when it has to be measured, and on GPU
    `kv_cache_memory`."""

    hash: Literal["xxh3_128", "sha256"]


class ResolvedSchedulerConfig(SchedulerConfig):
    """Nothing is open."""

    max_num_seqs: int
    max_num_batched_tokens: int
    steps_in_flight: int


class ResolvedConfig(Config):
    """A configuration for one kind of device, checked as a whole."""

    cache: ResolvedCacheConfig
    scheduler: ResolvedSchedulerConfig


def resolve(
    config: Config, device: Device, *, model_context_tokens: int | None = None
) -> ResolvedConfig:
    """The values that hold for `config` on `device`; `config` itself stays as it is.

    `model_context_tokens` is the model's own context length. Whoever knows it passes it, and
    then `model.max_model_len` is filled in too. Raises ConfigError when settings contradict
    each other. Resolving twice changes nothing.
    """
    _check_server(config.server)
    _check_ports(config.parallel)
    model = _resolve_model(config.model, model_context_tokens)
    scheduler = _resolve_scheduler(config.scheduler, device, config.parallel.pipeline_parallel_size)
    _check_chunked_prefill(scheduler, model.max_model_len)
    return ResolvedConfig(
        model=model,
        cache=_resolve_cache(config.cache, device, len(config.server.api_keys)),
        scheduler=scheduler,
        parallel=config.parallel,
        server=config.server,
    )


def check(config: Config) -> None:
    """Raises ConfigError if the settings contradict each other on every device there is."""
    problems = []
    for device in _devices(config.parallel):
        try:
            resolve(config, device)
        except ConfigError as error:
            problems.append(error)
        else:
            return
    raise problems[0]


def _devices(parallel: ParallelConfig) -> tuple[Device, ...]:
    return get_args(Device) if parallel.device == "auto" else (parallel.device,)


def _resolve_model(model: ModelConfig, model_context_tokens: int | None) -> ModelConfig:
    if model_context_tokens is None:
        return model
    if model.max_model_len is None:
        return model.model_copy(update={"max_model_len": model_context_tokens})
    if model.max_model_len > model_context_tokens:
        raise ConfigError(
            f"model.max_model_len is {model.max_model_len}, but the model was made for at most "
            f"{model_context_tokens} tokens: set it to {model_context_tokens} or less, or leave "
            f"it out."
        )
    return model


def _resolve_scheduler(
    scheduler: SchedulerConfig, device: Device, num_stages: int
) -> ResolvedSchedulerConfig:
    values = dict(scheduler)
    depending = {
        "max_num_seqs": MAX_NUM_SEQS[device],
        "max_num_batched_tokens": MAX_NUM_BATCHED_TOKENS[device],
        "steps_in_flight": num_stages + 1,
    }
    values.update({key: value for key, value in depending.items() if values[key] is None})
    return ResolvedSchedulerConfig.model_validate(values)


def _resolve_cache(cache: CacheConfig, device: Device, num_api_keys: int) -> ResolvedCacheConfig:
    _check_scales(cache)
    values = dict(cache)
    if cache.hash == "auto":
        values["hash"] = "sha256" if num_api_keys > 1 else "xxh3_128"
    if cache.kv_cache_memory is None and device == "cpu":
        values["kv_cache_memory"] = CPU_KV_CACHE_MEMORY
    return ResolvedCacheConfig.model_validate(values)


def _check_scales(cache: CacheConfig) -> None:
    if cache.kv_cache_dtype == "fp8_e4m3":
        return
    for key in ("k_scale", "v_scale"):
        scale = getattr(cache, key)
        if scale != 1:
            raise ConfigError(
                f"cache.{key} is {scale:g}, but with cache.kv_cache_dtype {cache.kv_cache_dtype} "
                f"nothing is scaled: set the dtype to fp8_e4m3, or leave the scale out."
            )


def _check_chunked_prefill(scheduler: ResolvedSchedulerConfig, max_model_len: int | None) -> None:
    if scheduler.enable_chunked_prefill:
        return
    if scheduler.long_prefill_token_threshold:
        raise ConfigError(
            f"scheduler.long_prefill_token_threshold is {scheduler.long_prefill_token_threshold}, "
            f"but scheduler.enable_chunked_prefill is off and no prompt may be split: set the "
            f"threshold to 0 or chunked prefill to true."
        )
    # A request of the full context length, resumed after a preemption, has to fit into one step.
    if max_model_len is not None and scheduler.max_num_batched_tokens < max_model_len:
        raise ConfigError(
            f"scheduler.max_num_batched_tokens is {scheduler.max_num_batched_tokens}, but with "
            f"scheduler.enable_chunked_prefill off it must be at least the context length of "
            f"{max_model_len} tokens: raise it, lower model.max_model_len, or set chunked "
            f"prefill to true."
        )


def _check_ports(parallel: ParallelConfig) -> None:
    if parallel.last_port < parallel.first_port:
        raise ConfigError(
            f"parallel.last_port is {parallel.last_port}, which is below parallel.first_port "
            f"({parallel.first_port}): set it to {parallel.first_port} or more."
        )


def _check_server(server: ServerConfig) -> None:
    if server.admin_key is not None and server.admin_key in server.api_keys:
        raise ConfigError(
            "server.admin_key is also one of server.api_keys: every client could administer the "
            "server, so give the admin key a value of its own."
        )
    if server.enable_chaos and server.admin_key is None:
        raise ConfigError(
            "server.enable_chaos lets processes be killed, and there is no server.admin_key to "
            "say by whom: set PALIMPSEST_ADMIN_KEY too."
        )
    if not (server.api_keys or server.allow_no_auth or _is_loopback(server.host)):
        raise ConfigError(
            f"server.host is {server.host}, which other machines can reach, and there is no API "
            f"key: set PALIMPSEST_API_KEYS, or server.allow_no_auth to true if everybody there "
            f"may use the server."
        )


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
