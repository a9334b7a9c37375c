"""Builds an engine from a checkpoint: loads the weights, sizes the pool, makes state, runner and scheduler."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn

from checkpoints import is_native
from pallas_kernels import backend
from turbojax.buckets import NARROW_LEN, Buckets
from turbojax.configs import MAX_STOP_IDS, EngineConfig
from turbojax.core.diagnosis import describe_layer
from turbojax.core.state import EngineState, init_state
from turbojax.engine.block_pool import BlockPool
from turbojax.engine.limits import SchedulerConfig
from turbojax.engine.metrics import EngineMetrics
from turbojax.engine.plan import MAX_BIASED_TOKENS
from turbojax.engine.prefix_cache import PrefixCache
from turbojax.engine.scheduler import Scheduler
from turbojax.errors import ConfigError, OutOfMemoryError
from turbojax.executables import Executables
from turbojax.kv_policy import policy_in, read_k_scale, read_kv_policy, with_kv_policy
from turbojax.memory import MemoryPlan, estimate_workspace, plan_memory, refusal
from turbojax.models.key_scale import with_k_scale
from turbojax.models.model import Model, load_model
from turbojax.models.packing import pack_weights
from turbojax.models.spec import ModelSpec
from turbojax.program_cache import use_compilation_cache
from turbojax.progress import progress
from turbojax.runner import JaxRunner
from turbojax.sharding import HERE, Placement, device_bytes, placements

# Short prompts on a CPU should not pay for rows of padding; on a GPU 128 rows take as long as fewer.
MIN_PREFILL_TOKENS, MIN_PREFILL_TOKENS_ON_GPU = 32, 128
# Of a prompt's attention over that of its linears, in FLOPs a second: 0.50 and 0.85 of an H200's dot rate.
ATTENTION_SPEED = 0.6
# Rows of the one program of `batch_invariant`: a decode step pays for all of them, a prompt for a pass each so many.
TILE_ROWS, TILE_ROWS_ON_GPU = 8, 64

Lowest = Callable[[int], int]

log = logging.getLogger(__name__)


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


def assemble(source: Path | Model, config: EngineConfig, lowest: Lowest = int) -> EngineParts:
    """Loads a model, or takes one that is in memory, and makes its engine, on the first devices.

    Of several processes, each assembles its share; `lowest` tells all of them the lowest of a number that may differ.

    Raises:
        CheckpointError, ModelConfigError: see `load_model`.
        ConfigError: there are fewer devices than `tp` and `dp` ask for, or `tp` does not fit the model.
        OutOfMemoryError: the pool does not fit.
    """
    [first, *_] = placements(config.tp, config.dp)
    use_compilation_cache()
    if isinstance(source, Model):
        return assemble_model(as_configured(source, config), config, lowest)
    with progress_bar(f"loading {source.name}", total=1) as advance:
        model = open_model(source, config, advance, first)
    return assemble_model(model, config, lowest)


def assemble_replicas(parts: EngineParts, config: EngineConfig) -> list[EngineParts]:
    """The other engines of `config.dp`, each with a copy of the first one's weights, device to device."""
    others = placements(config.tp, config.dp)[1:]
    return [assemble_model(moved(parts.model, placement), config) for placement in others]


def assemble_model(model: Model, config: EngineConfig, lowest: Lowest = int) -> EngineParts:
    """The engine of a model whose weights are on the device. The pool is allocated last, when all else is known.

    Raises:
        OutOfMemoryError: the pool does not fit.
    """
    use_compilation_cache()
    (limits, buckets), metrics = limits_of(config, model.spec), EngineMetrics()
    executables, memory = plan_engine(model, config, limits, buckets, metrics, lowest)
    log.info("%s", memory.table())
    make_state = on_devices(model.placement, state_maker(model.spec, config, limits, buckets, memory.num_pages))
    try:
        runner = JaxRunner(executables, make_state, debug=config.debug)
    except jax.errors.JaxRuntimeError as error:  # another process has taken what was free when it was planned
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise OutOfMemoryError(refusal(memory)) from error
    if backend.on_gpu() and executables.is_complete:
        runner.warm_up()
    pool = BlockPool(memory.num_pages, memory.page_len)
    cache = PrefixCache(pool, is_enabled=config.enable_prefix_caching, regime_of=model.spec.rope_regime)
    scheduler = Scheduler(limits, pool, metrics, cache)
    if config.debug:
        scheduler.endings.explain = lambda request: describe_layer(
            model.weights, request.token_ids(0, request.num_tokens)
        )
    return EngineParts(model, runner, scheduler, memory)


def limits_of(config: EngineConfig, spec: ModelSpec) -> tuple[SchedulerConfig, Buckets]:
    """What the config leaves open, by platform, and the shapes of steps that follow from it.

    LMDeploy's figures on a GPU: 256 sequences on an A100, 8,192 prompt tokens a step.
    """
    on_gpu, page_len = backend.on_gpu(), config.cache_block_seq_len
    max_batch_size = config.max_batch_size or (256 if on_gpu else 64)
    max_prefill_tokens = config.max_prefill_token_num or max(8192 if on_gpu else 2048, page_len)
    session_len = min(config.session_len or spec.max_len, spec.max_len)
    if config.session_len is not None and config.session_len > session_len:
        log.warning("session_len %d: the model was trained for %d, which holds", config.session_len, session_len)
    buckets = buckets_of(config, max_batch_size, max_prefill_tokens, session_len)
    limits = SchedulerConfig(
        num_slots=max_batch_size,
        session_len=session_len,
        max_prefill_tokens=max_prefill_tokens,
        max_chunks=buckets.max_chunks,
        num_decode_steps=buckets.num_decode_steps,
        max_queue_len=config.max_queue_len,
        max_multi_step_slots=max(buckets.multi_step_slots, default=0),
        max_multi_step_pages=buckets.narrow_table_len,
        mixed=buckets.mixed,
        parity_len=ATTENTION_SPEED * spec.parity_len,
    )
    return limits, buckets


def buckets_of(config: EngineConfig, max_batch_size: int, max_prefill_tokens: int, session_len: int) -> Buckets:
    """The shapes of steps, by platform. Up to 16 rows cost a GPU the same, but for the attention of a long sequence."""
    on_gpu = backend.on_gpu()
    if config.batch_invariant:
        return Buckets.of_tiles(
            max_batch_size=max_batch_size,
            max_prefill_tokens=max_prefill_tokens,
            tile_rows=TILE_ROWS_ON_GPU if on_gpu else TILE_ROWS,
        )
    few = (1, 8) if not on_gpu else (1, 16, 64) if session_len > NARROW_LEN else (16, 64)
    return Buckets.of(
        max_batch_size=max_batch_size,
        max_prefill_tokens=max_prefill_tokens,
        num_decode_steps=config.num_decode_steps,
        min_prefill_tokens=MIN_PREFILL_TOKENS_ON_GPU if on_gpu else MIN_PREFILL_TOKENS,
        max_len=session_len,
        page_len=config.cache_block_seq_len,
        split_slots=few,
        pick_rows=(16,) if on_gpu else (1, 8),
    )


def state_maker(
    spec: ModelSpec, config: EngineConfig, limits: SchedulerConfig, buckets: Buckets, num_pages: int
) -> Callable[[], EngineState]:
    """Makes a fresh state with a pool of `num_pages` pages."""
    # One at least: JAX 0.11 crashes where it compiles a shard_map over an array of no elements.
    num_params = max([1, *(processor.num_params for processor in config.logits_processors.values())])
    return functools.partial(
        init_state, spec, num_slots=limits.num_slots, num_pages=num_pages, page_len=config.cache_block_seq_len,
        max_len=limits.session_len, num_stop_ids=MAX_STOP_IDS, num_hidden_rows=buckets.max_rows,
        num_biased_tokens=MAX_BIASED_TOKENS, num_processor_params=num_params,
    )  # fmt: skip


def plan_engine(
    model: Model, config: EngineConfig, limits: SchedulerConfig, buckets: Buckets, metrics: EngineMetrics,
    lowest: Lowest = int,
) -> tuple[Executables, MemoryPlan]:  # fmt: skip
    """The memory plan, and the steps, compiled where the config asks for it.

    The pool is sized beside an estimate of the workspace. Compiled steps say what they really need: where that leaves
    too little, they are compiled again for a smaller pool.

    Raises:
        OutOfMemoryError: the pool does not fit.
    """
    workspace = estimate_workspace(model.spec, buckets, limits.session_len)
    maker, placement = functools.partial(state_maker, model.spec, config, limits, buckets), model.placement
    smallest = jax.eval_shape(maker(1))
    while True:
        memory = plan_memory(
            model.spec, device_bytes(model.weights), workspace, page_len=config.cache_block_seq_len,
            max_batch_size=limits.num_slots, max_len=limits.session_len, share=config.cache_max_entry_count,
            slot_bytes=tree_bytes((smallest.slots, smallest.hidden)), placement=placement,
        )  # fmt: skip
        memory = memory.limited(lowest(memory.num_pages))
        state = jax.eval_shape(on_devices(placement, maker(memory.num_pages)))
        executables = Executables(model.weights, state, buckets, metrics, config.logits_processors, placement)
        if not (backend.on_gpu() if config.compile_ahead is None else config.compile_ahead):
            return executables, memory
        with progress_bar("compiling", total=buckets.num_programs) as advance:
            executables.compile_all(lambda: advance(1))
        memory = memory.measured(executables.workspace_bytes())
        if lowest(memory.left_bytes) >= 0:
            return executables, memory
        if memory.workspace_bytes <= workspace:
            raise OutOfMemoryError(refusal(memory))
        workspace = memory.workspace_bytes


def moved(model: Model, placement: Placement) -> Model:
    """The model on other devices, as many as it is on."""
    return replace(model, weights=placement.copied(model.weights), placement=placement)


def on_devices(placement: Placement, make: Callable[[], EngineState]) -> Any:
    """A jitted maker of a state that lies on all devices of a placement."""
    if placement.num_shards > 1:
        return jax.jit(placement.spread(make))
    return jax.jit(make, out_shardings=placement.whole)


def open_model(
    path: Path, config: EngineConfig, advance: Callable[[float], None], placement: Placement = HERE
) -> Model:
    """A checkpoint of any kind as a model, packed where kernels will read it; `advance` hears the shares loaded.

    Raises:
        ConfigError: see `as_configured`, for native checkpoints.
        ModelConfigError: what a calibration left beside it is broken, or of another model; names the file.
    """
    if is_native(path):
        from turbojax.models.native import load_native_model  # with orbax, which few other starts need

        model = load_native_model(path, placement=placement)
        advance(1)
        return with_k_scale(as_configured(model, config), read_k_scale(path))
    config = with_kv_policy(config, read_kv_policy(path))
    model = load_model(
        path, dtype=config.dtype, kv_bits=config.kv_bits, kv_hadamard=bool(config.kv_hadamard),
        model_format=config.model_format, pack=backend.on_gpu(), placement=placement, progress=advance,
    )  # fmt: skip
    return with_k_scale(model, read_k_scale(path))


def as_configured(model: Model, config: EngineConfig) -> Model:
    """A model that is loaded already, with the KV precision that the config asks for, packed where kernels read it.

    Raises:
        ConfigError: its weights have another dtype or lie on another number of devices, or a model_format is given,
            which only files have.
    """
    from turbojax.models.native import with_kv_bits

    name, num_shards = model.path.name, model.placement.num_shards
    if config.tp != num_shards:
        accepted = f"{num_shards}: the weights of {name} are cut for so many devices"
        raise ConfigError("EngineConfig", "tp", config.tp, accepted)
    if config.dtype not in ("auto", model.spec.dtype):
        accepted = f"auto or {model.spec.dtype}, which the weights of {name} have"
        raise ConfigError("EngineConfig", "dtype", config.dtype, accepted)
    if config.model_format is not None:
        accepted = f"None: {name} is a native checkpoint or arrays in memory, which have no such format"
        raise ConfigError("EngineConfig", "model_format", config.model_format, accepted)
    config = with_kv_policy(config, policy_in(model.config, model.path))
    model = with_kv_bits(model, config.kv_bits, bool(config.kv_hadamard))
    if num_shards > 1 or not backend.on_gpu():
        return model
    return replace(model, weights=jax.device_put(pack_weights(model.weights)))


def eos_ids(model_config: Mapping[str, Any], generation_config: Mapping[str, Any]) -> tuple[int, ...]:
    """The model's end-of-sequence tokens: generation_config.json's, else config.json's."""
    ids = generation_config.get("eos_token_id", model_config.get("eos_token_id"))
    if ids is None:
        return ()
    return tuple(ids) if isinstance(ids, list | tuple) else (int(ids),)
