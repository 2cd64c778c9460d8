"""Every setting there is, with its type, its range, its default and what it means.

The docstring under a field is its description: the error messages, `palimpsest config` and
docs/configuration.md are made from these definitions, so a setting is described here alone.

A default of None means one of two things, and the docstring says which: the value depends on
the device or the model and is filled in by `configs.resolve`, or there is no such limit.
"""

from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ByteSize, ConfigDict, Field, SecretStr

MAX_UINT64 = 2**64 - 1


def _as_tuple(value: object) -> object:
    """A single text stands for a list of one; YAML has lists where we keep tuples."""
    if isinstance(value, str):
        return (value,)
    return tuple(value) if isinstance(value, list) else value


Names = Annotated[tuple[Annotated[str, Field(min_length=1)], ...], BeforeValidator(_as_tuple)]
MetricsCompat = Literal["none", "vllm"]
Secret = Annotated[SecretStr, Field(min_length=1)]
Secrets = Annotated[tuple[Secret, ...], BeforeValidator(_as_tuple)]


class Section(BaseModel):
    """Base of all sections. Strict: `true` is no number, and "16" is a text."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        hide_input_in_errors=True,
        use_attribute_docstrings=True,
        protected_namespaces=(),
    )


class ModelConfig(Section):
    """Which model is served, and how it is loaded."""

    model: str = Field("smollm2-135m", min_length=1)
    """A folder in Hugging Face format, a model id on the hub, or `smollm2-135m`, a small chat
    model that comes as a Python package and needs no hub."""
    revision: str | None = Field(None, min_length=1)
    """Branch, tag or commit on the hub. Unset: the model's default branch."""
    served_model_name: Names = ()
    """The names that requests may use for this model; the first one appears in answers.
    Unset: the value of `model.model`."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type of weights and activations. `auto`: the one that the model was stored in."""
    max_model_len: int | None = Field(None, ge=2)
    """Context length: the most tokens, prompt and output together, that a request may have.
    Unset: the model's own."""
    seed: int | None = Field(None, ge=0, le=MAX_UINT64)
    """Where the seeds of requests that bring none are drawn from. Unset: the operating
    system's randomness."""


class CacheConfig(Section):
    """The KV cache: how large its blocks are, how many there are, and how they are found."""

    block_size: int = Field(16, ge=1, le=1024)
    """Tokens in one block of KV cache."""
    num_blocks: int | None = Field(None, ge=2, le=1 << 24)
    """Blocks in the pool, with the null block (id 0), which nobody can use. Unset: as many as
    fit into the memory granted by `cache.kv_cache_memory` or `cache.gpu_memory_utilization`."""
    enable_prefix_caching: bool = True
    """Find the blocks of earlier requests that began with the same tokens. Also what gives a
    preempted request its context back without computing it again."""
    hash: Literal["auto", "xxh3_128", "sha256"] = "auto"
    """How the content of a block is identified. `xxh3_128` is fast, but somebody who wants to
    can make two contents collide; `sha256` is slower and safe. `auto`: `sha256` when more than
    one API key is configured, otherwise `xxh3_128`."""
    hash_seed: int | None = Field(None, ge=0, le=MAX_UINT64)
    """Start value of all block hashes. Unset: drawn once per deployment."""
    kv_cache_dtype: Literal["auto", "float32", "bfloat16", "float16", "fp8_e4m3"] = "auto"
    """Type of the cached keys and values. `auto`: the type of the model. `fp8_e4m3` takes one byte
    a value, so that twice as many blocks fit as with bfloat16, and keeps four significant bits."""
    k_scale: float = Field(1.0, gt=0)
    """With `fp8_e4m3`, keys are divided by this to be stored. Larger keys than 448 times the scale
    are cut off there, and small ones lose precision below 1/64 of it."""
    v_scale: float = Field(1.0, gt=0)
    """The same for values."""
    kv_cache_memory: ByteSize | None = Field(None, gt=0)
    """Memory for the KV cache of one rank, in bytes or with a unit (`512MiB`, `1GiB`). Unset:
    a fixed amount on CPU, on GPU what `cache.gpu_memory_utilization` leaves."""
    gpu_memory_utilization: float = Field(0.9, gt=0, le=1)
    """Share of each GPU's memory for weights, activations and KV cache together. Not read when
    `cache.kv_cache_memory` is set."""


class SchedulerConfig(Section):
    """Who runs in the next step, and who has to wait."""

    policy: Literal["fcfs", "priority"] = "fcfs"
    """`fcfs`: first come, first served. `priority`: the smallest `priority` of the requests
    first, and in order of arrival among equals."""
    max_num_seqs: int | None = Field(None, ge=1)
    """The most requests that run at the same time. Unset: depends on the device."""
    max_num_batched_tokens: int | None = Field(None, ge=1)
    """The most tokens that one step computes, over all requests. Unset: depends on the
    device."""
    steps_in_flight: int | None = Field(None, ge=1, le=64)
    """Steps that are planned before the first of them has answered. 1: no look-ahead. Unset: 2
    with one pipeline stage, otherwise one more than there are stages."""
    enable_chunked_prefill: bool = True
    """Spread a long prompt over several steps. Off: `scheduler.max_num_batched_tokens` must be
    at least the context length."""
    long_prefill_token_threshold: int = Field(0, ge=0)
    """The most tokens of one prompt in one step while other requests are there too. 0: off."""
    resume_first: bool = True
    """With the policy `priority`: a preempted request goes on before one of equal priority that
    has not started."""
    slot_preemption: bool = True
    """With the policy `priority`: when all `scheduler.max_num_seqs` places are taken, a strictly
    more urgent request takes the place of the least urgent one."""
    max_waiting_requests: int = Field(2048, ge=1)
    """Requests that may wait; the next one is answered with 429."""
    max_waiting_tokens: int = Field(4_000_000, ge=1)
    """Tokens that the waiting requests may have together; the next one is answered with 429."""


class ParallelConfig(Section):
    """Over how many workers one copy of the model is spread."""

    tensor_parallel_size: int = Field(1, ge=1, le=1024)
    """Workers that share each layer. Must divide the attention heads and the MLP of the model,
    and divide its KV heads or be a multiple of them."""
    pipeline_parallel_size: int = Field(1, ge=1, le=1024)
    """Groups of consecutive layers (stages), each on workers of its own. At most the number of
    layers."""
    cpus_per_rank: float = Field(0, ge=0)
    """CPUs that Ray reserves for each CPU worker. 0: none, so that a small machine can hold
    more workers than it has cores; all of them are then on one machine, whatever they need."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """What the workers compute on. `auto`: GPUs if the Ray cluster has any, otherwise CPUs."""
    plan_link: Literal["zmq", "ray"] = "zmq"
    """How the plan of each step reaches the workers. `zmq`: ZeroMQ sockets. `ray`: calls of Ray,
    ten times slower, for networks in which only Ray's ports are open; with several workers these
    still need ports of their own among themselves."""
    first_port: int = Field(20000, ge=1024, le=65535)
    """The first of the ports on which the scheduler and the workers listen for each other. On a
    single machine they listen on the loopback interface only."""
    last_port: int = Field(29999, ge=1024, le=65535)
    """The last of these ports."""


class ServerConfig(Section):
    """The HTTP side: where it listens, who may use it, and how long it waits."""

    host: str = Field("127.0.0.1", min_length=1)
    """Address to listen on. Anything but this machine itself needs `server.api_keys` or
    `server.allow_no_auth`."""
    port: int = Field(8000, ge=1, le=65535)
    """Port to listen on."""
    api_keys: Secrets = ()
    """Keys of the clients; without any, every request is served. Only from a configuration file
    or from the environment variable `PALIMPSEST_API_KEYS` (separated by commas)."""
    admin_key: Secret | None = None
    """Key of the administration endpoints, which do not exist without it. Must not be one of
    `server.api_keys`. Only from a configuration file or from `PALIMPSEST_ADMIN_KEY`."""
    enable_chaos: bool = False
    """Let whoever has `server.admin_key`, which this needs, kill and stall processes of the server
    with `palimpsest chaos`."""
    allow_no_auth: bool = False
    """Listen beyond this machine although no API key is configured."""
    allowed_origins: Names = ()
    """Origins of the web pages whose scripts may call the server (CORS). `*`: all."""
    drain_seconds: float = Field(600, ge=0)
    """How long running requests may go on when the server is told to stop."""
    group_start_seconds: float = Field(600, gt=0)
    """How long a group of workers may take to load the model and report itself."""
    max_recovery_seconds: float = Field(60, ge=0)
    """How long new requests are queued while lost workers are replaced; then they are answered
    with 503."""
    max_queue_seconds: float = Field(600, gt=0)
    """How long a request may wait for its first step; then it is answered with 503."""
    num_replicas: int = Field(1, ge=1, le=64)
    """Processes that take requests, tokenize and write the streams. With `palimpsest serve` on a
    cluster of its own one listens itself, which is three times as cheap as several behind Serve's
    proxy; so more than one only helps where one does not keep up."""
    metrics_compat: MetricsCompat = "none"
    """`vllm`: `/metrics` also has the names that dashboards made for vLLM look for."""
    step_deadline_seconds: float = Field(30, gt=0)
    """How long a step may take before its workers count as lost. Steps that are slow in general
    get more, and the first one of a new group gets `group_start_seconds`. A process that does not
    answer at all counts as lost after the same time, but not before ten seconds."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """The least important lines that are logged. `info` has one line for each request, `debug`
    also one for each probe."""
    log_format: Literal["text", "json"] = "text"
    """`json`: one object a line, with the id of the request."""


class Config(Section):
    """All settings."""

    model: ModelConfig = ModelConfig()
    cache: CacheConfig = CacheConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    parallel: ParallelConfig = ParallelConfig()
    server: ServerConfig = ServerConfig()
