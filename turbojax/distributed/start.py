"""Where several processes become one engine: they meet, start JAX together, agree, and then lead or follow."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import logging
import platform
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib import metadata
from typing import TYPE_CHECKING, Any

from turbojax import __version__
from turbojax.distributed.follower import follow
from turbojax.distributed.leader import LeaderRunner
from turbojax.distributed.link import Link
from turbojax.distributed.meeting import Facts, agree, gather, join, lowest, settle, told_lowest
from turbojax.distributed.places import Place, place_of
from turbojax.distributed.watch import Watch
from turbojax.errors import ClusterError, ConfigError, CoordinatorUnreachableError

if TYPE_CHECKING:
    from turbojax.assembly import EngineParts
    from turbojax.configs import EngineConfig
    from turbojax.engine.plan import Runner

LIBRARIES = ("jax", "jaxlib", "numpy", "ml_dtypes")
# JAX's own watch, behind ours: it ends a process whose peers are silent for so long.
HEARTBEAT_S = 20
SHUTDOWN_S = 10

log = logging.getLogger(__name__)


@dataclass
class Processes:
    """This process among those of one engine, while they are together.

    Attributes:
        place: which one it is.
        links: to the followers, or to the leader.
        watch: knows whether the job has failed.
    """

    place: Place
    links: list[Link]
    watch: Watch = field(default_factory=Watch)

    def settle(self, facts: Facts) -> None:
        """All processes have these facts alike.

        Raises:
            ClusterMismatchError: one differs; all of them hear in what.
        """
        if self.place.is_leader:
            settle(self.links, facts)
        else:
            agree(self.links[0], facts)

    def lowest(self, value: int) -> int:
        """The lowest of what the processes have, who all ask at the same point."""
        return lowest(self.links, value) if self.place.is_leader else told_lowest(self.links[0], value)

    def runner(self, parts: EngineParts) -> Runner:
        """The leader's runner on all processes. A follower does not come back: it runs what the leader says.

        Raises:
            ClusterMismatchError: the processes have another model or pool.
            SystemExit: of a follower, once the leader has closed its engine.
            ClusterError: of a follower: the leader is lost, or ended the job because another process is.
        """
        self.settle(facts_of_engine(parts))
        if self.place.is_leader:
            return LeaderRunner(parts.runner, self.links, self.watch, on_close=stop_jax)
        log.info("process %s of %s follows", self.place.process_id, self.place.num_processes)
        follow(self.links[0], parts.runner, self.watch)
        stop_jax()
        raise SystemExit(0)

    def report_to(self, fail: Callable[[ClusterError], None]) -> None:
        """Has it called, from any thread, with what ends the job."""
        self.watch.report_to(fail)


class Alone:
    """One process by itself."""

    def lowest(self, value: int) -> int:
        return value

    def runner(self, parts: EngineParts) -> Runner:
        return parts.runner

    def report_to(self, fail: Callable[[ClusterError], None]) -> None:
        """Nobody else can be lost."""


@contextlib.contextmanager
def together(config: EngineConfig) -> Iterator[Processes | Alone]:
    """The processes of an engine while it is made; see `meet`. Where that fails here, the others hear it.

    Raises:
        ConfigError, ClusterError: see `meet`.
    """
    if config.cluster is None:
        yield Alone()
        return
    processes = meet(config)
    try:
        yield processes
    except BaseException:
        for link in processes.links:
            link.close()
        raise


def meet(config: EngineConfig) -> Processes:
    """Waits until all processes of the config's cluster are there and alike, and starts JAX over their devices.

    Nothing may have used JAX in this process before.

    Raises:
        ConfigError: the place of this process is neither given nor detected; the config has what several processes
            cannot do.
        CoordinatorUnreachableError: processes did not come in time.
        ClusterMismatchError: they differ in versions or config.
    """
    assert config.cluster is not None
    place = place_of(config.cluster)
    check_config(config)
    facts = facts_of(config)
    links = gather(place, facts) if place.is_leader else [join(place, facts)]
    try:
        check_devices(config.tp, start_jax(place), place)
    except BaseException:
        for link in links:
            link.close()
        raise
    return Processes(place, links)


def start_jax(place: Place) -> int:
    """The devices of all processes.

    Raises:
        CoordinatorUnreachableError: JAX's processes did not meet, though ours did: most likely a port is closed.
        ClusterError: JAX was used before.
    """
    import jax

    try:
        jax.distributed.initialize(
            place.coordinator_address, place.num_processes, place.process_id,
            cluster_detection_method="deactivate", initialization_timeout=max(1, int(place.timeout_s)),
            heartbeat_timeout_seconds=HEARTBEAT_S, shutdown_timeout_seconds=SHUTDOWN_S,
        )  # fmt: skip
    except RuntimeError as error:
        text = (
            f"process {place.process_id} of {place.num_processes}: JAX does not start over {place.coordinator_address}"
        )
        kind = ClusterError if "before" in str(error) or "once" in str(error) else CoordinatorUnreachableError
        raise kind(f"{text}: {error}") from error
    return jax.device_count()


def check_devices(tp: int, num_devices: int, place: Place) -> None:
    """
    Raises:
        ConfigError: a device, and so perhaps a process, would have no part in the model.
    """
    if tp != num_devices:
        accepted = f"{num_devices}: the devices of all {place.num_processes} processes"
        raise ConfigError("EngineConfig", "tp", tp, accepted)


def stop_jax() -> None:
    """Ends JAX's watch over the others, which takes their end for a crash: all processes call it together."""
    import jax

    jax.distributed.shutdown()


def check_config(config: EngineConfig) -> None:
    """
    Raises:
        ConfigError: a field that several processes cannot honour.
    """
    for name, accepted in {"dp": 1, "debug": False}.items():
        if getattr(config, name) != accepted:
            reason = f"{accepted!r} with several processes"
            hint = ": run an engine for each and spread requests by `turbojax serve proxy`" if name == "dp" else ""
            raise ConfigError("EngineConfig", name, getattr(config, name), reason + hint)


def facts_of(config: EngineConfig) -> dict[str, str]:
    """What decides which steps a process runs, so far as it is known before the model is: versions and config."""
    versions = {"turbojax": __version__} | {name: version_of(name) for name in LIBRARIES}
    versions["python"] = platform.python_version()
    fields = [each.name for each in dataclasses.fields(config) if each.name != "cluster"]
    return versions | {f"EngineConfig.{name}": stated(getattr(config, name)) for name in fields}


def facts_of_engine(parts: EngineParts) -> dict[str, str]:
    """What decides it once the engine is there: the model, how its weights are laid out, the pool."""
    import jax

    model = parts.model
    shapes = [(leaf.shape, str(leaf.dtype)) for leaf in jax.tree.leaves(model.weights)]
    return {
        "model": digest((model.spec, jax.tree.structure(model.weights), shapes)),
        "pages of the KV pool": str(parts.memory.num_pages),
        "devices": str(jax.device_count()),
    }


def version_of(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "none"


def stated(value: Any) -> str:
    """A field in words that are the same in every process; functions by their names."""
    if isinstance(value, dict):
        return ", ".join(f"{name}: {stated(each)}" for name, each in sorted(value.items())) or "none"
    function = getattr(value, "function", None)
    if function is not None:
        return f"{function.__module__}.{function.__qualname__}{value.param_shapes}"
    return repr(value)


def digest(value: Any) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()[:16]
