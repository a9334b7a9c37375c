"""Ray Data: what an actor makes of a batch, on a fake engine in this process; what is refused before a job starts."""

import asyncio
import os
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.pipeline import harness as fakes
from turbojax.configs import GenerationConfig
from turbojax.errors import ConfigError, RowError

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'turbojax[ray]'")
pa = pytest.importorskip("pyarrow", reason="Ray Data needs pyarrow: pip install 'turbojax[ray]'")

from turbojax.integrations import ray_data  # noqa: E402
from turbojax.integrations.ray_data import TurbojaxGenerator, generate  # noqa: E402

GEN = GenerationConfig(max_new_tokens=6)
EXAMPLE = Path(__file__).parents[2] / "examples" / "ray_batch.py"


@pytest.fixture
def answer(monkeypatch):
    """Answers a batch by an actor on a fake engine."""
    pipes = []

    def run(batch, **how):
        pipes.append(fakes.make(eos_ids=()))
        monkeypatch.setattr(ray_data, "open_pipeline", lambda model, engine: pipes[-1])
        actor = TurbojaxGenerator(gen_config=GEN, **how)
        return asyncio.run(actor(batch))

    yield run
    for pipe in pipes:
        pipe.close()


def test_rows_get_their_answers_and_other_columns_stay_as_they_are(answer):
    prompts = [[1, 2, 3], [4], [5, 6]]
    table = pa.table(
        {
            "id": pa.array([7, None, 9], pa.int64()),
            "tokenized_prompt": pa.array(prompts, pa.list_(pa.int64())),
            "when": pa.array([1, 2, 3], pa.timestamp("ms")),
            "sampling_params": [{"max_tokens": 2}, None, {"max_tokens": 4}],
        }
    )
    out = answer(table)
    assert out.select(table.column_names).equals(table)
    want = [fakes.expected(ids, num, ()) for ids, num in zip(prompts, (2, 6, 4), strict=True)]
    assert out["generated_tokens"].to_pylist() == want
    assert out["generated_text"].to_pylist() == [fakes.LETTERS.decode(ids) for ids in want]
    assert out["num_input_tokens"].to_pylist() == [3, 1, 2]
    assert out["num_generated_tokens"].to_pylist() == [2, 6, 4]
    assert out["finish_reason"].to_pylist() == ["length"] * 3


def test_a_batch_of_numpy_columns_is_the_same_batch(answer):
    chat = [{"role": "user", "content": "AB"}]
    columns = {"messages": [chat, chat[:1]], "id": [1, 2]}
    of_numpy = {"messages": np.array([*columns["messages"], None], object)[:2], "id": np.array([1, 2])}
    assert answer(of_numpy).to_pylist() == answer(pa.table(columns)).to_pylist()


def test_broken_rows_end_the_job_or_say_so_in_a_column(answer):
    table = pa.table({
        "prompt": ["AB", None, "CD", "E" * 200],
        "sampling_params": [None, None, {"max_tokens": 0}, None],
    })  # fmt: skip
    with pytest.raises(RowError, match="row 1 of its batch: no prompt"):
        answer(table)
    with pytest.raises(RowError, match=r"row 0 of its batch: PromptTooLongError: .*200"):
        answer(table.slice(3))
    out = answer(table, should_continue_on_error=True).to_pylist()
    errors = [row["__inference_error__"] for row in out]
    assert errors[0] == ""
    assert "no prompt" in errors[1]
    assert "max_new_tokens is 0; accepted: None or an int >= 1" in errors[2]
    assert "PromptTooLongError" in errors[3]
    assert [row["num_generated_tokens"] for row in out] == [6, 0, 0, 0]
    assert [row["finish_reason"] for row in out] == ["length", "error", "error", "error"]


def test_a_dataset_without_prompts_ends_the_job_even_where_rows_may_fail(answer):
    with pytest.raises(RowError, match=r"no prompts: a column .* is expected, there are question, id"):
        answer(pa.table({"question": ["Hi"], "id": [1]}), should_continue_on_error=True)


def test_an_engine_that_has_failed_takes_its_process_with_it(answer, monkeypatch):
    """An exception would end the job; a process that is gone makes Ray start the actor again."""
    monkeypatch.setattr(fakes.SlowRunner, "fails", True)
    monkeypatch.setattr(fakes.SlowRunner, "reset", lambda self: 1 / 0)
    gone = []

    def leave(code):
        gone.append(code)
        raise SystemExit(code)

    monkeypatch.setattr(os, "_exit", leave)
    with pytest.raises(SystemExit):
        answer(pa.table({"prompt": ["AB"]}), should_continue_on_error=True)
    assert gone == [1]


def test_a_job_that_cannot_be_is_refused_before_it_starts():
    with pytest.raises(ConfigError, match="num_actors is 0; accepted: an int >= 1"):
        generate(None, num_actors=0)
    with pytest.raises(ConfigError, match="one answer"):
        generate(None, gen_config=GenerationConfig(n=2, do_sample=True))


def test_the_example_says_where_a_job_that_goes_on_would_wait_for_ever(monkeypatch):
    """Ray's own filter of rows that are done is one more actor."""
    monkeypatch.setattr(ray, "init", lambda **_: None)
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 2.0})
    monkeypatch.setattr(sys, "argv", ["ray_batch.py", "--input", "in", "--output", "out", "--checkpoint", "done"])
    with pytest.raises(SystemExit, match=r"needs a CPU besides those of the actors \(2 x 1\)"):
        runpy.run_path(str(EXAMPLE), run_name="__main__")
