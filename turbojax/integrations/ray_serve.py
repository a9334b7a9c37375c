"""The server as a Ray Serve deployment (`pip install turbojax[ray,serve]`): replicas of one model behind Serve's proxy.

    serve.run(application("path/or/repo", EngineConfig(...), num_replicas=4, num_gpus=1), route_prefix="/")

or from a shell or a Serve config file, with fields of `build`:

    serve run turbojax.integrations.ray_serve:build model=path/or/repo num_replicas=4 num_gpus=1
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from turbojax.configs import EngineConfig
from turbojax.errors import ConfigError, EngineFailedError, MissingExtraError
from turbojax.serve.settings import ServeConfig

try:
    from ray import serve

    from turbojax.serve.app import create_app
    from turbojax.serve.service import Service
except ImportError as error:
    raise MissingExtraError("Ray Serve is not installed: pip install 'turbojax[ray,serve]'") from error

# Requests that a replica has at once, where nobody says: Serve's own default of 5 would leave an engine empty.
MAX_ONGOING_REQUESTS = 512
# What Serve's proxy decides, see `ray.serve.config.HTTPOptions`.
OF_THE_PROXY = ("server_name", "server_port", "ssl_certfile", "ssl_keyfile")
DEFAULT_NAME = "SmolLM2-135M-Instruct"


@serve.ingress()
class TurbojaxServer:
    """One replica: an engine, and the routes of `turbojax serve api_server` in front of it."""

    def __init__(self, model: str | Path | None, engine: EngineConfig | None, config: ServeConfig) -> None:
        """Opens the model in the replica's process."""
        from turbojax.api import pipeline

        self._pipe = pipeline(model, engine)
        self._service = Service(self._pipe, config, config.model_name or (str(model) if model else DEFAULT_NAME))

    def __serve_build_asgi_app__(self) -> Any:
        """Serve asks for the app once the replica is there."""
        return create_app(self._service)

    def check_health(self) -> None:
        """Serve asks this regularly, and replaces a replica that raises.

        Raises:
            EngineFailedError: the engine cannot go on.
        """
        failure = self._pipe.status.failure
        if failure is not None:
            raise EngineFailedError(failure)


def application(
    model: str | Path | None = None,
    engine: EngineConfig | None = None,
    config: ServeConfig | None = None,
    *,
    num_replicas: int = 1,
    num_cpus: float = 1,
    num_gpus: float = 0,
    max_ongoing_requests: int = MAX_ONGOING_REQUESTS,
    **deployment: Any,
) -> serve.Application:
    """The server, ready for `serve.run`.

    Args:
        model: what `turbojax.pipeline` takes, as each node finds it.
        engine: how each engine runs.
        config: of the server; where it listens is Serve's own affair.
        num_replicas: engines, wherever Ray finds room.
        num_cpus, num_gpus: of each replica.
        max_ongoing_requests: that a replica has at once; Serve's proxy holds others back.
        deployment: further options of `serve.deployment` (`autoscaling_config`, ...).

    Raises:
        ConfigError: the config says where to listen.
    """
    config = config or ServeConfig()
    defaults = {field.name: field.default for field in dataclasses.fields(ServeConfig)}
    for field in OF_THE_PROXY:
        value = getattr(config, field, None)
        if field in defaults and value != defaults[field]:
            accepted = "its default under Ray Serve, whose proxy listens: give serve.start its http_options"
            raise ConfigError("ServeConfig", field, value, accepted)
    options = {
        "name": "turbojax", "num_replicas": num_replicas, "max_ongoing_requests": max_ongoing_requests,
        "ray_actor_options": {"num_cpus": num_cpus, "num_gpus": num_gpus},
    }  # fmt: skip
    if "autoscaling_config" in deployment:
        del options["num_replicas"]
    return serve.deployment(TurbojaxServer).options(**(options | deployment)).bind(model, engine, config)


def build(args: Mapping[str, Any]) -> serve.Application:
    """The server from plain values, as Serve's command line and config files give them.

    Args:
        args: those of `application`, with `engine` and `config` as objects of their fields.

    Raises:
        ConfigError: an unknown name, or a value that is out of range.
    """
    known = [name for name in inspect.signature(application).parameters if name != "deployment"]
    given = dict(args)
    if unknown := sorted(given.keys() - set(known)):
        raise ConfigError("build", "args", ", ".join(unknown), ", ".join(known))
    for name, kind in {"engine": EngineConfig, "config": ServeConfig}.items():
        given[name] = made(kind, name, given.get(name) or {})
    for name in ("num_replicas", "max_ongoing_requests", "num_cpus", "num_gpus"):
        if isinstance(given.get(name), str):  # the command line knows texts alone
            given[name] = number(name, given[name])
    return application(**given)


def made(kind: type, name: str, fields: Any) -> Any:
    """A config from an object of its fields."""
    accepted = [field.name for field in dataclasses.fields(kind)]
    if not isinstance(fields, Mapping) or fields.keys() - set(accepted):
        raise ConfigError("build", name, fields, f"an object of {', '.join(accepted)}")
    return kind(**fields)


def number(name: str, text: str) -> float:
    """A number from the command line; whole where it is."""
    try:
        value = float(text)
    except ValueError as error:
        raise ConfigError("build", name, text, "a number") from error
    return int(value) if value == int(value) else value
