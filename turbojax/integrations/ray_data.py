"""Bulk generation with Ray Data (`pip install turbojax[ray]`): an actor for `Dataset.map_batches`.

    answers = generate(dataset, "path/or/repo", EngineConfig(...), num_actors=8, num_gpus=1)
    answers.write_parquet(...)

Rows follow the column conventions of `ray.data.llm`, see docs/ray.md.
"""

from __future__ import annotations

import asyncio
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from turbojax.configs import EngineConfig, GenerationConfig
from turbojax.engine.response import Response
from turbojax.errors import (
    ConfigError,
    EngineClosedError,
    EngineFailedError,
    MissingExtraError,
    RowError,
    TurbojaxError,
)
from turbojax.integrations.ray_rows import (
    ERROR_COLUMN,
    PARAMS_COLUMN,
    PROMPT_COLUMNS,
    RowJob,
    answer_columns,
    check_base,
    job_of,
)
from turbojax.rules import is_int

if TYPE_CHECKING:
    from turbojax.api import Pipeline

try:
    import pyarrow as pa
    import ray
    import ray.data
except ImportError as error:
    raise MissingExtraError("Ray Data is not installed: pip install 'turbojax[ray]'") from error

# Batches that an actor has at once: the engine's slots stay full while the last rows of one of them end.
BATCHES_IN_FLIGHT = 2
# Read by XLA's CPU client when it starts: how many threads it takes.
NUM_THREADS = "NPROC"

TOKEN_LOGPROBS = pa.list_(pa.list_(pa.struct([("token_id", pa.int32()), ("logprob", pa.float64())])))
TYPES = {
    "generated_text": pa.string(), "generated_tokens": pa.list_(pa.int32()), "num_input_tokens": pa.int32(),
    "num_generated_tokens": pa.int32(), "finish_reason": pa.string(), "logprobs": TOKEN_LOGPROBS,
    "prompt_logprobs": TOKEN_LOGPROBS, ERROR_COLUMN: pa.string(),
}  # fmt: skip

log = logging.getLogger(__name__)


class TurbojaxGenerator:
    """Answers batches of rows on an engine of its own; the class that `Dataset.map_batches` makes actors of.

    It keeps no row between batches, so a batch can be given to any actor, or once more to the same: what Ray does when
    an actor or its node is lost.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        engine: EngineConfig | None = None,
        gen_config: GenerationConfig | None = None,
        *,
        should_continue_on_error: bool = False,
    ) -> None:
        """Opens the model in this process.

        Args:
            model: what `turbojax.pipeline` takes, as this node finds it.
            engine: how the engine runs.
            gen_config: what the rows' sampling_params leave open.
            should_continue_on_error: a row that cannot be answered says why in the column `__inference_error__`, and
                the others go on; False ends the job with its RowError.

        Raises:
            ConfigError: gen_config asks for what rows have no place for.
            TurbojaxError, CheckpointError: the model cannot be used.
        """
        self._base = check_base(gen_config or GenerationConfig())
        self._continues = should_continue_on_error
        take_cpus()
        self._pipe = open_pipeline(model, engine)

    async def __call__(self, batch: pa.Table | dict[str, Any]) -> pa.Table:
        """The rows with their answers, in their order; other columns stay as they are.

        Raises:
            RowError: of the first row that cannot be answered, where that ends the job.
        """
        table = as_table(batch)
        jobs = [self._job(row) for row in rows_of(table)]
        self._raise_first(jobs)
        answers = await asyncio.gather(*map(self._answer, jobs))
        failure = self._pipe.status.failure
        if failure is not None:
            leave_process(failure)
        self._raise_first(answers)
        columns = answer_columns(answers, self._base, with_errors=self._continues)
        for name, values in columns.items():
            array = pa.array(values, TYPES[name])
            place = table.schema.get_field_index(name)
            table = table.append_column(name, array) if place < 0 else table.set_column(place, name, array)
        return table

    def _job(self, row: dict[str, Any]) -> RowJob | RowError:
        try:
            return job_of(row, self._base)
        except RowError as error:
            return error

    async def _answer(self, job: RowJob | RowError) -> Response | RowError:
        if isinstance(job, RowError):
            return job
        try:
            response = await self._pipe.agenerate(job.prompt, job.config, do_preprocess=False)
        except (EngineFailedError, EngineClosedError) as error:
            leave_process(str(error))
        except TurbojaxError as error:
            return RowError(f"{type(error).__name__}: {error}")
        assert isinstance(response, Response)
        return response if response.error is None else RowError(response.error)

    def _raise_first(self, found: list[Any]) -> None:
        """Raises the first error where that ends the job."""
        errors = [(number, one) for number, one in enumerate(found) if isinstance(one, RowError)]
        if errors and not self._continues:
            number, error = errors[0]
            raise RowError(f"row {number} of its batch: {error}; should_continue_on_error=True answers the others")


def generate(
    dataset: ray.data.Dataset,
    model: str | Path | None = None,
    engine: EngineConfig | None = None,
    gen_config: GenerationConfig | None = None,
    *,
    num_actors: int = 1,
    num_cpus: float | None = None,
    num_gpus: float | None = None,
    batch_size: int = 64,
    should_continue_on_error: bool = False,
    **map_batches: Any,
) -> ray.data.Dataset:
    """The dataset with an answer to each row; like all of Ray Data it runs when it is consumed or written.

    Ray starts an actor again that was lost, and gives its rows to another (`max_restarts` and `max_task_retries` are
    -1 in Ray Data unless `map_batches` says otherwise).

    Args:
        dataset: rows with `prompt` (a text, taken as it is), `messages` (a chat) or `tokenized_prompt` (token ids),
            and `sampling_params` where they have some.
        model, engine, gen_config, should_continue_on_error: see `TurbojaxGenerator`.
        num_actors: engines, wherever Ray finds room.
        num_cpus: of each actor; a whole number also bounds the threads of a model that runs on the CPU.
        num_gpus: of each actor.
        batch_size: rows that are given to an actor, and retried, together. An actor has two such batches at a time, so
            half of `max_batch_size` keeps its slots full.
        map_batches: further arguments of `Dataset.map_batches`.

    Raises:
        ConfigError: num_actors or batch_size is no whole number above 0; gen_config, see `TurbojaxGenerator`.
    """
    for name, value in {"num_actors": num_actors, "batch_size": batch_size}.items():
        if not is_int(value, 1):
            raise ConfigError("generate", name, value, "an int >= 1")
    check_base(gen_config or GenerationConfig())
    how = {"should_continue_on_error": should_continue_on_error}
    return dataset.map_batches(
        TurbojaxGenerator,
        fn_constructor_args=(model, engine, gen_config),
        fn_constructor_kwargs=how,
        batch_format="pyarrow",
        batch_size=batch_size,
        compute=ray.data.ActorPoolStrategy(
            size=num_actors,
            max_tasks_in_flight_per_actor=2 * BATCHES_IN_FLIGHT,
            max_concurrent_calls_per_actor=BATCHES_IN_FLIGHT,
        ),
        num_cpus=num_cpus,
        num_gpus=num_gpus,
        **map_batches,
    )


def open_pipeline(model: str | Path | None, engine: EngineConfig | None) -> Pipeline:
    """Imports jax, which must not happen before the process knows its threads."""
    from turbojax.api import pipeline

    return pipeline(model, engine)


def take_cpus() -> None:
    """Bounds XLA's threads on the CPU by the whole CPUs that Ray gave this actor: two actors on two cores would else
    run four. Ray itself only counts them."""
    if not ray.is_initialized():
        return
    num_cpus = ray.get_runtime_context().get_assigned_resources().get("CPU", 0)
    if num_cpus >= 1 and num_cpus == int(num_cpus):
        os.environ.setdefault(NUM_THREADS, str(int(num_cpus)))


def leave_process(reason: str) -> None:
    """Ends this process, so that Ray starts the actor again with a fresh engine and gives its rows to another.

    An exception would not do: Ray ends the job for one, or would retry the rows on this engine, which is lost.
    """
    log.error("the engine has failed, its actor ends: %s", reason)
    logging.shutdown()
    os._exit(1)


def as_table(batch: pa.Table | dict[str, Any]) -> pa.Table:
    """A batch of any format of `map_batches` as a table; pyarrow's alone leaves every type as it was."""
    if isinstance(batch, pa.Table):
        return batch
    from ray.data.block import BlockAccessor

    return BlockAccessor.for_block(BlockAccessor.batch_to_block(batch)).to_arrow()


def rows_of(table: pa.Table) -> list[dict[str, Any]]:
    """The columns that say what is wanted, as plain values; others are not read.

    Raises:
        RowError: none of them is a prompt: the dataset is wrong, not one of its rows.
    """
    names = [name for name in (*PROMPT_COLUMNS, PARAMS_COLUMN) if name in table.column_names]
    if table.num_rows and names in ([], [PARAMS_COLUMN]):
        expected = f"a column {', '.join(PROMPT_COLUMNS)} is expected"
        raise RowError(f"no prompts: {expected}, there are {', '.join(table.column_names)}")
    return table.select(names).to_pylist()
