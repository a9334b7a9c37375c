"""Jobs on Ray's own machinery: two actors answer like one pipeline, and nothing is lost when one is killed."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.serve.harness import SMALL, write_model
from turbojax.api import pipeline
from turbojax.configs import EngineConfig, GenerationConfig

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'turbojax[ray]'")
pytest.importorskip("pyarrow", reason="Ray Data needs pyarrow: pip install 'turbojax[ray]'")
# Ray warns of its own settings.
pytestmark = [pytest.mark.cluster, pytest.mark.filterwarnings("ignore::DeprecationWarning:ray.*")]

ENGINE, GEN = EngineConfig(**SMALL), GenerationConfig(max_new_tokens=8, ignore_eos=True)
NUM_ROWS = 24
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("ray") / "tiny")


@pytest.fixture(scope="module")
def cluster():
    # Places that Ray counts, not cores. A job that goes on takes four: reading, Ray's filter of rows that are done, the
    # engine, writing; the actor of the job that failed may still have one.
    ray.init(num_cpus=6, include_dashboard=False, log_to_driver=False, object_store_memory=100 * 1024**2)
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def rows():
    return [{"id": i, "prompt": f"number {i}", "sampling_params": {"max_tokens": 4 + i % 3}} for i in range(NUM_ROWS)]


@pytest.fixture(scope="module")
def expected(folder, rows):
    """What one pipeline answers, by id."""
    with pipeline(folder, ENGINE) as pipe:
        configs = [GenerationConfig(max_new_tokens=r["sampling_params"]["max_tokens"], ignore_eos=True) for r in rows]
        responses = pipe([row["prompt"] for row in rows], configs, do_preprocess=False)
    return {row["id"]: response.token_ids for row, response in zip(rows, responses, strict=True)}


def by_id(answers):
    found = {row["id"]: row["generated_tokens"] for row in answers}
    assert len(found) == len(answers), "a row came twice"
    return found


def test_two_actors_answer_like_one_pipeline(cluster, folder, rows, expected):
    from turbojax.integrations.ray_data import generate

    broken = {"id": NUM_ROWS, "prompt": None, "sampling_params": {"max_tokens": 4}}
    dataset = ray.data.from_items([*rows, broken]).repartition(5)
    answers = generate(
        dataset, folder, ENGINE, GEN, num_actors=2, num_cpus=1, batch_size=4, should_continue_on_error=True
    ).take_all()
    errors = {row["id"]: row["__inference_error__"] for row in answers if row["__inference_error__"]}
    assert set(errors) == {NUM_ROWS}
    assert "no prompt" in errors[NUM_ROWS]
    assert by_id(answers) == expected | {NUM_ROWS: []}


def test_a_killed_actor_loses_no_row(cluster, folder, rows, expected, tmp_path):
    from tests.integrations.ray_actors import Dying

    dataset = ray.data.from_items(rows).repartition(6)
    answers = dataset.map_batches(
        Dying,
        fn_constructor_args=(str(tmp_path), folder, ENGINE, GEN),
        batch_format="pyarrow",
        batch_size=4,
        compute=ray.data.ActorPoolStrategy(size=2),
        num_cpus=1,
    ).take_all()
    assert (tmp_path / "killed").exists(), "no actor was killed"
    assert by_id(answers) == expected


def test_a_job_that_ended_early_goes_on_where_its_blocks_were_written(cluster, folder, rows, expected, tmp_path):
    from ray.data.checkpoint import CheckpointConfig

    from tests.integrations.ray_actors import Counting

    ray.data.from_items(rows).repartition(6).write_json(str(tmp_path / "in"))
    context = ray.data.DataContext.get_current()

    def run(fatal_id, seen):
        seen.mkdir()
        context.checkpoint_config = CheckpointConfig(id_column="id", checkpoint_path=str(tmp_path / "checkpoint"))
        dataset = ray.data.read_json(str(tmp_path / "in"), override_num_blocks=6)
        dataset.map_batches(
            Counting,
            fn_constructor_args=(str(seen), fatal_id, folder, ENGINE, GEN),
            batch_format="pyarrow",
            batch_size=4,
            compute=ray.data.ActorPoolStrategy(size=1, max_tasks_in_flight_per_actor=1),
            num_cpus=1,
        ).write_json(str(tmp_path / "out"))

    try:
        with pytest.raises(Exception, match="the job is stopped here"):
            run(NUM_ROWS - 1, tmp_path / "first")
        run(None, tmp_path / "second")
    finally:
        context.checkpoint_config = None
    assert len(list((tmp_path / "second").iterdir())) < NUM_ROWS, "nothing was kept of the first run"
    assert by_id(ray.data.read_json(str(tmp_path / "out")).take_all()) == expected


def test_the_example_runs_on_a_cluster_unchanged(cluster, folder, rows, expected, tmp_path):
    """A process of its own, which finds the cluster by Ray's own environment variable."""
    source, answers = tmp_path / "in.jsonl", tmp_path / "out"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows[:6]))
    options = {
        "input": source, "output": answers, "model": folder, "session-len": 512, "batch-size": 2, "num-actors": 2,
    }  # fmt: skip
    command = [sys.executable, ROOT / "examples" / "ray_batch.py", *(f"--{name}={it}" for name, it in options.items())]
    address = ray.get_runtime_context().gcs_address
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"RAY_ADDRESS": address}, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for path in answers.iterdir() for line in path.read_text().splitlines()]
    assert len(found) == 6
    assert all(row["__inference_error__"] == "" and row["num_generated_tokens"] > 0 for row in found)
    assert {row["id"] for row in found} == set(range(6))


def test_replicas_behind_ray_serve_speak_openais_protocol(cluster, folder):
    serve = pytest.importorskip("ray.serve", reason="Ray Serve is not installed: pip install 'turbojax[ray,serve]'")
    import httpx

    from turbojax.integrations.ray_serve import application
    from turbojax.serve.settings import ServeConfig

    port = free_port()
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    try:
        serve.run(application(folder, ENGINE, ServeConfig(model_name="tiny")), route_prefix="/")
        with httpx.Client(base_url=f"http://127.0.0.1:{port}/v1", timeout=120) as client:
            assert [model["id"] for model in client.get("/models").json()["data"]] == ["tiny"]
            body = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5, "temperature": 0}
            whole = client.post("/chat/completions", json=body).json()
            assert 1 <= whole["usage"]["completion_tokens"] <= 5
            with client.stream("POST", "/chat/completions", json=body | {"stream": True}) as stream:
                events = [line for line in stream.iter_lines() if line.startswith("data: ")]
            assert events[-1] == "data: [DONE]"
            pieces = [json.loads(event[6:])["choices"] for event in events[:-1]]
            text = "".join(choice[0]["delta"].get("content") or "" for choice in pieces if choice)
            assert text == whole["choices"][0]["message"]["content"]
            assert client.post("/chat/completions", json=body | {"model": "other"}).status_code == 404
    finally:
        serve.shutdown()


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
