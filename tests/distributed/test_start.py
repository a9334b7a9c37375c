"""What processes tell each other before they start, and what several of them cannot do."""

import pytest

from tests.pipeline import harness as fakes
from turbojax.api import Pipeline
from turbojax.configs import ClusterConfig, EngineConfig, GenerationConfig, LogitsProcessor
from turbojax.distributed.places import place_of
from turbojax.distributed.start import Alone, check_config, check_devices, facts_of, together
from turbojax.distributed.watch import Watch
from turbojax.errors import ConfigError, EngineFailedError, ProcessLostError

GEN = GenerationConfig(max_new_tokens=3)
CLUSTER = {"coordinator_address": "127.0.0.1:9000", "num_processes": 2, "token": "a token of the test job"}


def double(logits, times, in_prompt):
    return logits * 2


def config(process_id, **fields):
    return EngineConfig(cluster=ClusterConfig(**CLUSTER, process_id=process_id), **fields)


def test_processes_of_one_job_have_the_same_facts_whichever_they_are():
    processors = {"double": LogitsProcessor(double)}
    fields = {"max_batch_size": 8, "cache_max_entry_count": 0.1, "logits_processors": processors}
    assert facts_of(config(0, **fields)) == facts_of(config(1, **fields))


@pytest.mark.parametrize(
    ("fields", "name", "value"),
    [
        ({"max_batch_size": 9}, "EngineConfig.max_batch_size", "9"),
        ({"kv_policy": ((8, 4),)}, "EngineConfig.kv_policy", "((8, 4),)"),
        (
            {"logits_processors": {"double": LogitsProcessor(double, ((),))}},
            "EngineConfig.logits_processors",
            "double: tests.distributed.test_start.double((),)",
        ),
    ],
)
def test_a_field_that_differs_is_a_fact_that_differs(fields, name, value):
    facts, others = facts_of(config(0)), facts_of(config(1, **fields))
    assert {fact for fact in facts if facts[fact] != others[fact]} == {name}
    assert others[name] == value


def test_versions_are_facts():
    import jax

    assert facts_of(config(0))["jax"] == jax.__version__


@pytest.mark.parametrize(("field", "value"), [("dp", 2), ("debug", True)])
def test_what_several_processes_cannot_do_is_refused(field, value):
    with pytest.raises(ConfigError, match=f"EngineConfig.{field} is {value}; accepted: .* with several processes"):
        check_config(config(0, **{field: value}))


def test_the_model_is_cut_between_all_devices_there_are():
    place = place_of(config(0).cluster, {})
    check_devices(8, 8, place)
    with pytest.raises(ConfigError, match=r"EngineConfig\.tp is 4; accepted: 8: the devices of all 2 processes"):
        check_devices(4, 8, place)


def test_a_cluster_is_a_config():
    with pytest.raises(ConfigError, match=r"EngineConfig\.cluster is 2; accepted: None or a ClusterConfig"):
        EngineConfig(cluster=2)


def test_one_process_by_itself_asks_nobody():
    with together(EngineConfig()) as processes:
        assert isinstance(processes, Alone)
        assert processes.lowest(7) == 7


def test_a_failure_of_the_job_ends_the_requests_of_its_engine_with_the_reason():
    with fakes.make(eos_ids=()) as pipe:
        watch = Watch()
        watch.fail(ProcessLostError("process 1 of 2 is lost: it closed its connection"))
        watch.report_to(pipe._loop.fail)
        with pytest.raises(EngineFailedError, match="process 1 of 2 is lost"):
            pipe([1, 2], GEN)
        assert "process 1 of 2 is lost" in pipe.status.failure


def test_an_engine_that_ends_lets_go_of_whoever_runs_its_steps():
    runner, pipe = runner_and_pipe()
    pipe([1, 2, 3], GEN)
    assert not runner.is_closed
    pipe.close()
    assert runner.is_closed


def runner_and_pipe() -> tuple[fakes.SlowRunner, Pipeline]:
    pipe = fakes.make(eos_ids=())
    return pipe._loop._stepper._runner, pipe
