"""The Serve application, as Ray Serve's own commands know it.

serve run cluster.app:build_app model=smollm2-135m cache.num_blocks=4096
serve build cluster.app:app -o app.yaml
serve deploy app.yaml

`build_app` takes arguments, also in a file for `serve deploy`; `app` is the application with all
defaults, for `serve build`, which gives no arguments.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import SecretStr
from ray.serve import Application

from cluster.asgi import KeyDigests
from cluster.engine_spec import EngineSpec
from cluster.http_settings import HttpSettings
from cluster.ingress import Ingress, IngressSpec
from configs import Config, ConfigError, check, load
from configs.settings import all_settings, sections

# Serve's own limits, which would answer before ours do.
_MAX_ONGOING_REQUESTS = 100_000
_NO_LIMIT = -1
_MAX_REPLICAS_PER_NODE = 100
_HEALTH_CHECK_SECONDS = 1.0
# What a replica needs, after its time is over, to tell the clients that are left.
_LAST_WORDS_SECONDS = 10.0

_PATHS_OF_ARGUMENTS = "config, model, SECTION.KEY, or SECTION with keys in it"


def build_app(args: Mapping[str, Any]) -> Application:
    """The application that `args` ask for.

    `config` is a YAML file, `model` stands for `model.model`, `SECTION.KEY` is any setting, and a
    section may also be given with its keys inside. Keys come from the file or the environment of
    whoever builds the application. Raises ConfigError.
    """
    config = config_of(args)
    # Nobody else asks whether the engine is ready before requests are sent here.
    return application(config, EngineSpec.of(config), waits_for_engine=True)


def __getattr__(name: str) -> Application:
    """`app` is made when it is asked for: who imports `build_app` does not want it."""
    if name == "app":
        return build_app({})
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def config_of(args: Mapping[str, Any], environ: Mapping[str, str] | None = None) -> Config:
    """Raises ConfigError for arguments that are no settings, and for settings that no device
    could be used with. `environ` defaults to the environment of the process."""
    path = args.get("config")
    config = load(Path(path) if path else None, list(_overrides(args)), environ).config
    check(config)
    return config


def application(
    config: Config, engine: EngineSpec, *, waits_for_engine: bool = False
) -> Application:
    """The application for `config`, over the engine that was made from it.

    `waits_for_engine`: a replica takes part once its engine has been ready, so that Serve reports
    the application as running when it can answer.
    """
    server = config.server
    spec = IngressSpec(
        engine=engine,
        model=config.model,
        http=HttpSettings(
            api_keys=_digests(server.api_keys),
            admin_key=_digests([server.admin_key] if server.admin_key else []),
            allowed_origins=server.allowed_origins,
            # Serve adds the header to all that it passes on, and also where a replica listens.
            sends_request_id=False,
            max_waiting_requests=config.scheduler.max_waiting_requests,
            max_waiting_tokens=config.scheduler.max_waiting_tokens,
            metrics_compat=server.metrics_compat,
        ),
        max_queue_seconds=server.max_queue_seconds,
        max_recovery_seconds=server.max_recovery_seconds,
        enable_chaos=server.enable_chaos,
        waits_for_engine=waits_for_engine,
    )
    deployment = Ingress.options(
        num_replicas=server.num_replicas,
        max_ongoing_requests=_MAX_ONGOING_REQUESTS,
        max_queued_requests=_NO_LIMIT,
        graceful_shutdown_timeout_s=server.drain_seconds + _LAST_WORDS_SECONDS,
        # A dead replica is missed at the next check, and until then nobody takes its place.
        health_check_period_s=_HEALTH_CHECK_SECONDS,
        # A small machine must be able to hold the ingress beside its workers.
        ray_actor_options={"num_cpus": 0},
        # No limit in earnest: an actor that asks for nothing at all Ray places at random, this one
        # spread over the machines.
        max_replicas_per_node=_MAX_REPLICAS_PER_NODE,
        logging_config={"enable_access_log": False},
    )
    return deployment.bind(spec)


def _digests(keys: Sequence[SecretStr]) -> KeyDigests:
    return KeyDigests.of(key.get_secret_value() for key in keys)


def _overrides(args: Mapping[str, Any]) -> Iterator[str]:
    """The arguments as `section.key=value`."""
    for name, value in args.items():
        if name == "config":
            continue
        if name == "model" and isinstance(value, str):
            yield f"model.model={value}"
        elif name in sections() and isinstance(value, Mapping):
            for key, inner in value.items():
                yield f"{name}.{key}={_text(inner)}"
        elif name in all_settings():
            yield f"{name}={_text(value)}"
        else:
            raise ConfigError(f"{name} is no argument: there are {_PATHS_OF_ARGUMENTS}.")


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)
