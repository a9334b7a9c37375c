"""Builds an engine from a checkpoint: loads the weights, sizes the pool, makes state, runner and scheduler."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn

from checkpoints import is_native
from pallas_kernels import backend
from turbojax.buckets import Buckets
from turbojax.configs import MAX_STOP_IDS, EngineConfig
from turbojax.core.state import init_state
from turbojax.engine.block_pool import BlockPool
from turbojax.engine.scheduler import Scheduler, SchedulerConfig
from turbojax.errors import ConfigError
from turbojax.memory import MemoryPlan, plan_memory
from turbojax.models.model import Model, load_model
from turbojax.models.packing import pack_weights
from turbojax.progress import progress
from turbojax.runner import JaxRunner


@dataclass(frozen=True)
class EngineParts:
    """What a pipeline stands on."""

    model: Model
    runner: JaxRunner
    scheduler: Scheduler
    memory: MemoryPlan


@contextmanager
def progress_bar(title: str, total: int) -> Iterator[Any]:
    """A bar on standard error while something long runs; nothing where that is no terminal."""
    columns = TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn()
    with progress(*columns) as bar:
        task = bar.add_task(title, total=total)
        yield lambda count: bar.advance(task, count)


def tree_bytes(tree: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def assemble(path: Path, config: EngineConfig) -> EngineParts:
    """Loads a model and makes its engine.

    Raises:
        CheckpointError, ModelConfigError: see `load_model`.
        OutOfMemoryError: the pool does not fit.
    """
    with progress_bar(f"loading {path.name}", total=1) as advance:
        model = open_model(path, config, advance)
    return assemble_model(model, config)


def assemble_model(model: Model, config: EngineConfig) -> EngineParts:
    """The engine of a model whose weights are on the device.

    Raises:
        OutOfMemoryError: the pool does not fit.
    """
    session_len = min(config.session_len or model.spec.max_len, model.spec.max_len)
    memory = plan_memory(
        model.spec,
        tree_bytes(model.weights),
        page_len=config.cache_block_seq_len,
        max_batch_size=config.max_batch_size,
        max_len=session_len,
        share=config.cache_max_entry_count,
    )
    runner = make_runner(model, config, memory, session_len)
    limits = SchedulerConfig(
        config.max_batch_size, session_len, config.max_prefill_token_num,
        runner.max_prefill_chunks, config.num_decode_steps,
    )  # fmt: skip
    scheduler = Scheduler(limits, BlockPool(memory.num_pages, memory.page_len))
    return EngineParts(model, runner, scheduler, memory)


def open_model(path: Path, config: EngineConfig, advance: Callable[[float], None]) -> Model:
    """A checkpoint of any kind as a model, packed where kernels will read it; `advance` hears the shares loaded.

    Raises:
        ConfigError: a native checkpoint was saved for another dtype.
    """
    packed = backend.on_gpu()
    if is_native(path):
        from turbojax.models.native import load_native_model, with_kv_bits  # with orbax, which no other start needs

        model = load_native_model(path)
        advance(1)
        if config.dtype not in ("auto", model.spec.dtype):
            accepted = f"auto or {model.spec.dtype}, which {path.name} was saved for"
            raise ConfigError("EngineConfig", "dtype", config.dtype, accepted)
        model = with_kv_bits(model, config.kv_bits)
    else:  # what will be packed stays on the host until it is
        place = np.asarray if packed else jnp.asarray
        model = load_model(path, dtype=config.dtype, kv_bits=config.kv_bits, place=place, progress=advance)
    return replace(model, weights=jax.tree.map(jnp.asarray, pack_weights(model.weights))) if packed else model


def make_runner(model: Model, config: EngineConfig, memory: MemoryPlan, session_len: int) -> JaxRunner:
    """State and runner; compiles every bucket first where the config asks for it."""
    state = init_state(
        model.spec, num_slots=config.max_batch_size, num_pages=memory.num_pages, page_len=memory.page_len,
        max_len=session_len, num_stop_ids=MAX_STOP_IDS,
    )  # fmt: skip
    buckets = Buckets.of(
        max_batch_size=config.max_batch_size,
        max_prefill_tokens=config.max_prefill_token_num,
        num_decode_steps=config.num_decode_steps,
    )
    runner = JaxRunner(model.weights, state, buckets)
    if config.compile_ahead:
        with progress_bar("compiling", total=len(list(buckets.all_shapes()))) as advance:
            runner.warm_up(lambda shape: advance(1))
    return runner


def eos_ids(model_config: Mapping[str, Any], generation_config: Mapping[str, Any]) -> tuple[int, ...]:
    """The model's end-of-sequence tokens: generation_config.json's, else config.json's."""
    ids = generation_config.get("eos_token_id", model_config.get("eos_token_id"))
    if ids is None:
        return ()
    return tuple(ids) if isinstance(ids, list | tuple) else (int(ids),)
