"""Which process this is: as given, as Slurm, Open MPI or Kubernetes say, or an error that names what is missing."""

import socket

import pytest

from turbojax.distributed.places import TOKEN_VARIABLE, ClusterConfig, place_of
from turbojax.errors import ConfigError

TOKEN = "sixteen letters!"
SLURM = {"SLURM_JOB_ID": "4097", "SLURM_STEP_NODELIST": "n1", "SLURM_NTASKS": "4", "SLURM_PROCID": "2"}


def test_what_is_given_counts_before_what_a_launcher_says():
    config = ClusterConfig("10.0.0.1:1234", 2, 1, TOKEN, 5)
    place = place_of(config, SLURM)
    assert (place.host, place.port, place.control_port) == ("10.0.0.1", 1234, 1235)
    assert (place.num_processes, place.process_id, place.is_leader) == (2, 1, False)
    assert (place.token, place.timeout_s) == (TOKEN, 5)
    assert place_of(ClusterConfig("[fe80::1]:80", 2, 0, TOKEN), {}).coordinator_address == "[fe80::1]:80"


@pytest.mark.parametrize(
    ("hosts", "first"),
    [
        ("node001", "node001"),
        ("node001,host2", "node001"),
        ("node[001-0015],host2", "node001"),
        ("node[001,007-015],host2", "node001"),
        ("node[7]", "node7"),
        ("a1,node[001-003]", "a1"),
    ],
)
def test_slurm_names_the_first_host_and_a_port_of_the_job(hosts, first):
    place = place_of(ClusterConfig(token=TOKEN), SLURM | {"SLURM_STEP_NODELIST": hosts})
    assert (place.coordinator_address, place.num_processes, place.process_id) == (f"{first}:61442", 4, 2)
    neighbour = place_of(ClusterConfig(token=TOKEN), SLURM | {"SLURM_JOB_ID": "4098"})
    assert not {neighbour.port, neighbour.control_port} & {place.port, place.control_port}


@pytest.mark.parametrize(
    ("uri", "address"),
    [
        ("1531576320.0;tcp://10.96.0.1,10.148.0.1:34911", "10.96.0.1:"),
        ("1314521088.0;tcp6://[fe80::b9b,2620:10d::2]:43370", "[fe80::b9b]:"),
    ],
)
def test_open_mpi_names_its_launcher(uri, address):
    environment = {"OMPI_MCA_orte_hnp_uri": uri, "OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_RANK": "0"}
    place = place_of(ClusterConfig(), environment | {TOKEN_VARIABLE: TOKEN})
    assert place.coordinator_address.startswith(address)
    assert 61440 <= place.port < 65535
    assert (place.num_processes, place.process_id, place.is_leader) == (8, 0, True)


def test_kubernetes_names_the_pod_of_index_0_of_an_indexed_job(monkeypatch):
    monkeypatch.setattr(socket, "getfqdn", lambda name: f"{name}.jobs.default.svc.cluster.local")
    pod = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "3", "HOSTNAME": "big-model-3"}
    place = place_of(ClusterConfig(num_processes=4, token=TOKEN), pod)
    assert place.coordinator_address == "big-model-0.jobs.default.svc.cluster.local:55527"
    assert place.process_id == 3
    with pytest.raises(ConfigError, match="num_processes is None; accepted: a value: Kubernetes says none"):
        place_of(ClusterConfig(token=TOKEN), pod)


@pytest.mark.parametrize(
    ("config", "environment", "words"),
    [
        (ClusterConfig(), {}, "coordinator_address is None; accepted: a value: no launcher says none"),
        (ClusterConfig("a:1", 2, 1), {}, "token is None; accepted: a value, or TURBOJAX_CLUSTER_TOKEN"),
        (ClusterConfig("a:1", 2, token=TOKEN), SLURM, None),
        (ClusterConfig("a:1", token=TOKEN, process_id=7), SLURM, "process_id is 7; accepted: None or an int of 0 .. 3"),
        (ClusterConfig("a:1", 2, 1), {TOKEN_VARIABLE: "short"}, "token is .*at least 16 characters"),
    ],
)
def test_what_is_missing_or_does_not_fit_is_named(config, environment, words):
    with pytest.raises(ConfigError, match=words):
        place_of(config, environment)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"coordinator_address": "10.0.0.1"}, "coordinator_address is '10.0.0.1'; accepted: None or 'host:port'"),
        ({"coordinator_address": "a:65535"}, "an int of 1 .. 65534: the next one is used too"),
        ({"coordinator_address": 7}, "coordinator_address is 7"),
        ({"num_processes": 0}, "num_processes is 0"),
        ({"num_processes": 2, "process_id": 2}, "process_id is 2; accepted: None or an int of 0 .. 1"),
        ({"timeout_s": 0}, "timeout_s is 0"),
        ({"token": "short"}, "at least 16"),
    ],
)
def test_fields_out_of_range_are_named(fields, words):
    with pytest.raises(ConfigError, match=words):
        ClusterConfig(**fields)
