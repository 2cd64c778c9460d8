"""What the HTTP side can be told."""

from dataclasses import dataclass, field

from cluster.asgi import KeyDigests
from configs.sections import MetricsCompat


@dataclass(frozen=True, slots=True)
class HttpSettings:
    """Survives pickling, and holds no key."""

    api_keys: KeyDigests = field(default_factory=KeyDigests)
    admin_key: KeyDigests = field(default_factory=KeyDigests)
    """At most one; without it there are no administration routes."""
    allowed_origins: tuple[str, ...] = ()
    """Origins of the web pages whose scripts may call; `*`: all."""
    sends_request_id: bool = True
    """Off where somebody else adds the header `x-request-id`, as Ray Serve does."""
    keep_alive_seconds: float = 10.0
    """After so long without news a stream says that it is still there."""
    max_waiting_requests: int = 2048
    max_waiting_tokens: int = 4_000_000
    """Of the whole queue; with several keys each may have half of it."""
    metrics_compat: MetricsCompat = "none"
    """Whose names `/metrics` speaks besides our own."""
