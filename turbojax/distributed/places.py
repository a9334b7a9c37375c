"""Which of how many processes this one is, and where the first of them is found: given, or as the launcher says."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from turbojax.errors import ConfigError
from turbojax.rules import check, is_int, is_real

MAX_PROCESSES = 4096
MIN_TOKEN_LEN = 16
TOKEN_VARIABLE = "TURBOJAX_CLUSTER_TOKEN"
# JAX takes a port for its coordinator from a job's number in this way, so that two jobs on a host do not meet.
FIRST_JOB_PORT, NUM_JOB_PORTS = 61440, 4096
KUBERNETES_PORT = 55527  # JAX's
ADDRESS = re.compile(r"(?:\[([0-9a-fA-F:.]+)\]|([^\s:\[\]/]+)):(\d{1,5})")


@dataclass(frozen=True)
class ClusterConfig:
    """Several processes that run one engine. A field of None is detected: from Slurm, Open MPI or Kubernetes.

    Attributes:
        coordinator_address: "host:port" of process 0, where JAX's processes meet; they also need the next port, on
            which process 0 tells the others what to run.
        num_processes: how many there are.
        process_id: which one this is, from 0.
        token: a text that all processes of the job have and nobody else; None is the environment variable
            TURBOJAX_CLUSTER_TOKEN.
        timeout_s: how long processes wait for each other to start.

    Raises:
        ConfigError: a field is out of range.
    """

    coordinator_address: str | None = None
    num_processes: int | None = None
    process_id: int | None = None
    token: str | None = None
    timeout_s: float = 120.0

    def __post_init__(self) -> None:
        num, number = self.num_processes, self.process_id
        most = (num if is_int(num, 1) else MAX_PROCESSES) - 1  # type: ignore[operator]
        rules = {
            "coordinator_address": (
                self.coordinator_address is None or split_address(self.coordinator_address) is not None,
                "None or 'host:port', the port an int of 1 .. 65534: the next one is used too",
            ),
            "num_processes": (
                num is None or is_int(num, 1, MAX_PROCESSES),
                f"None or an int of 1 .. {MAX_PROCESSES}",
            ),
            "process_id": (number is None or is_int(number, 0, most), f"None or an int of 0 .. {most}"),
            "token": (
                self.token is None or (isinstance(self.token, str) and len(self.token) >= MIN_TOKEN_LEN),
                f"None or a text of at least {MIN_TOKEN_LEN} characters",
            ),
            "timeout_s": (is_real(self.timeout_s, 1e-3, 86400), "a number of seconds up to a day"),
        }
        check("ClusterConfig", self, rules)


@dataclass(frozen=True)
class Place:
    """This process among the others, with nothing left open."""

    host: str
    port: int
    num_processes: int
    process_id: int
    token: str
    timeout_s: float

    @property
    def coordinator_address(self) -> str:
        """Where JAX's processes meet."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def control_port(self) -> int:
        """Where the leader tells the others what to run."""
        return self.port + 1

    @property
    def is_leader(self) -> bool:
        return self.process_id == 0


@dataclass(frozen=True)
class Found:
    """What a launcher says; None where it does not."""

    launcher: str
    address: str | None = None
    num_processes: int | None = None
    process_id: int | None = None


def place_of(config: ClusterConfig, environment: Mapping[str, str] | None = None) -> Place:
    """The place of this process: what the config leaves open is what its launcher says.

    Raises:
        ConfigError: something is neither given nor said, or does not fit.
    """
    environment = os.environ if environment is None else environment
    found = next((said for detect in LAUNCHERS if (said := detect(environment)) is not None), Found("no launcher"))
    given = {
        "coordinator_address": config.coordinator_address
        or environment.get("JAX_COORDINATOR_ADDRESS")
        or found.address,
        "num_processes": found.num_processes if config.num_processes is None else config.num_processes,
        "process_id": found.process_id if config.process_id is None else config.process_id,
        "token": config.token or environment.get(TOKEN_VARIABLE),
    }
    for field, value in given.items():
        if value is None:
            how = f"a value, or {TOKEN_VARIABLE}" if field == "token" else f"a value: {found.launcher} says none"
            raise ConfigError("ClusterConfig", field, value, how)
    whole: Any = ClusterConfig(**given, timeout_s=config.timeout_s)  # type: ignore[arg-type]  # checked there
    split = split_address(whole.coordinator_address)
    assert split is not None
    return Place(*split, whole.num_processes, whole.process_id, whole.token, whole.timeout_s)


def split_address(address: object) -> tuple[str, int] | None:
    """Host and port of "host:port" or "[host]:port"; None where it is neither."""
    match = ADDRESS.fullmatch(address) if isinstance(address, str) else None
    if match is None or not 1 <= int(match[3]) <= 65534:
        return None
    return match[1] or match[2], int(match[3])


# -- launchers, by the environment that they give to processes ----------------------------------------------


def slurm(environment: Mapping[str, str]) -> Found | None:
    """The first host of the step's list, a port of the job's number."""
    names = ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_NTASKS", "SLURM_PROCID")
    if any(name not in environment for name in names):
        return None
    job, hosts, num, number = (environment[name] for name in names)
    prefix, _, inside = hosts.partition("[")
    first = hosts.split(",")[0] if "," in prefix or not inside else prefix + re.split(r"[-,\]]", inside)[0]
    return Found("Slurm", f"{first}:{job_port(int(job))}", int(num), int(number))


def open_mpi(environment: Mapping[str, str]) -> Found | None:
    """The launcher's own address."""
    uri = environment.get("OMPI_MCA_orte_hnp_uri")
    num, number = environment.get("OMPI_COMM_WORLD_SIZE"), environment.get("OMPI_COMM_WORLD_RANK")
    if num is None or number is None:
        return None
    host = re.search(r"tcp://([^,:]+)|tcp6://\[([^,\]]+)", uri or "")
    if uri is None or host is None:
        return Found("Open MPI", None, int(num), int(number))
    port = job_port(int(uri.split(".")[0]) // NUM_JOB_PORTS)
    address = f"{host[1]}:{port}" if host[1] else f"[{host[2]}]:{port}"
    return Found("Open MPI", address, int(num), int(number))


def kubernetes(environment: Mapping[str, str]) -> Found | None:
    """An indexed Job whose pods have a subdomain; how many there are is known to the cluster's API alone."""
    index = environment.get("JOB_COMPLETION_INDEX")
    if index is None or "KUBERNETES_SERVICE_HOST" not in environment:
        return None
    name, _, domain = socket.getfqdn(environment.get("HOSTNAME", "")).partition(".")
    job, _, number = name.rpartition("-")
    address = f"{job}-0.{domain}:{KUBERNETES_PORT}" if domain and number == index else None
    return Found("Kubernetes", address, None, int(index))


def job_port(job: int) -> int:
    """An even one, since the next is used too."""
    return FIRST_JOB_PORT + job % (NUM_JOB_PORTS // 2) * 2


LAUNCHERS: tuple[Callable[[Mapping[str, str]], Found | None], ...] = (slurm, open_mpi, kubernetes)
