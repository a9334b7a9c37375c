"""The compiled steps of an engine: each bucket once, all of them at the start or each when it is first met."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Hashable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax

from pallas_kernels import backend
from turbojax.batches import Batches
from turbojax.buckets import Buckets, PickShape, StepShape
from turbojax.core import split, steps
from turbojax.core.logprobs import Logprobs
from turbojax.core.state import EngineState, copy_pages, join, join_rules
from turbojax.core.weights import Weights
from turbojax.engine.metrics import EngineMetrics
from turbojax.engine.plan import MAX_LOGPROBS, StepPlan
from turbojax.processors import LogitsProcessor
from turbojax.program_cache import ProgramCache, jax_cache_hits
from turbojax.sharding import HERE, Placement

JOIN, JOIN_RULES, COPY_PAGES = "join", "join_rules", "copy_pages"  # buckets.NUM_OTHER_PROGRAMS
# XLA compiles a program on one thread for most of its time; more threads than this only compete for memory.
MAX_COMPILE_THREADS = 16
# Sums of shards run in the stream that computes, since nothing is left to compute beside them: in a stream of their own
# they wait for two events each (Llama-3.1-8B over two H200s: 2.66 -> 2.46 ms a step at batch 1, 6.13 -> 5.96 at 64).
OPTIONS_OF_SHARDS = {"xla_gpu_disable_async_collectives": "ALLREDUCE,ALLGATHER"}


class Executables:
    """Programs by what they run: `step(shape)`, `pick(shape)`, `join`, `join_rules`, `copy_pages`.

    All donate the engine's state.

    They are compiled from shapes alone, so the state need not exist yet: what a program needs beside it is known
    before the pool takes the rest of the memory. A compiled program is called as fast as a jitted function.
    """

    def __init__(
        self,
        weights: Weights,
        state: EngineState,
        buckets: Buckets,
        metrics: EngineMetrics,
        processors: Mapping[str, LogitsProcessor] | None = None,
        placement: Placement = HERE,
    ) -> None:
        """`state` needs no values, only shapes (`jax.eval_shape`), over all devices of the placement."""
        self.weights, self.buckets, self.metrics, self.placement = weights, buckets, metrics, placement
        self.processors = dict(processors or {})
        self.batches = Batches.of(state, tuple(self.processors))
        self._state = placement.abstract(state)
        self._programs: dict[Hashable, Any] = {}
        self._cache = ProgramCache.of(weights, self._state, devices=placement.devices)
        self.is_complete = False
        self._join, self._rules = self._jitted(join), self._jitted(join_rules)
        self._copy = self._jitted(copy_pages)
        self._decode = self._jitted(steps.decode, 1, static_argnames=("num_steps", "table_len"))
        self._forward, self._pick = self._jitted(split.forward_rows), self._jitted(split.pick, 1)
        self._tile = self._jitted(split.forward_tile)
        functions = tuple(self.processors.values())
        processed = functools.partial(split.pick_processed, num_logprobs=MAX_LOGPROBS, processors=functions)
        self._pick_processed = self._jitted(processed, 2)

    def _jitted(self, step: Callable[..., Any], num_outputs: int = 0, **options: Any) -> Any:
        """A step on all devices, its state donated, that counts its traces; see `Placement.spread`."""
        metrics, spread = self.metrics, self.placement.spread(step, num_outputs)

        @functools.wraps(step)
        def traced(*args: Any, **kwargs: Any) -> Any:
            metrics.num_traces += 1
            return spread(*args, **kwargs)

        in_line = OPTIONS_OF_SHARDS if backend.on_gpu() and self.placement.num_shards > 1 else None
        return jax.jit(traced, donate_argnames="state", compiler_options=in_line, **options)

    # -- programs -----------------------------------------------------------------------------------------

    def step(self, shape: StepShape) -> Any:
        """(weights, state, decode batch) -> (state, tokens) of a fused step.

        A split step gives the state alone, and takes a prefill batch too if it has chunks, or a tile batch instead.
        """
        return self._program(shape)

    def pick(self, shape: PickShape) -> Any:
        """(weights, state, pick batch) -> (state, tokens).

        Where logits are processed: (weights, state, pick batch, masks, targets) -> (state, tokens, PickOutputs).
        """
        return self._program(shape)

    @property
    def join(self) -> Any:
        """(state, joins) -> state."""
        return self._program(JOIN)

    @property
    def join_rules(self) -> Any:
        """(state, rules) -> state."""
        return self._program(JOIN_RULES)

    @property
    def copy_pages(self) -> Any:
        """(state, copies) -> state."""
        return self._program(COPY_PAGES)

    def keys(self) -> list[Hashable]:
        """Every program that there can be; the largest step first, since it takes longest to compile."""
        shapes = sorted(self.buckets.all_shapes(), key=lambda s: (s.num_rows, s.num_decode_slots))
        return [*reversed(shapes), *self.buckets.all_picks(), JOIN, JOIN_RULES, COPY_PAGES]

    def _program(self, key: Hashable) -> Any:
        program = self._programs.get(key)
        if program is None:
            program = self._load(key)
            self.metrics.num_programs_read += program is not None
            program = self._programs[key] = program or self._compile(key, *self._lower(key))
            self.metrics.num_compilations += 1
            self.metrics.num_late_compilations += self.is_complete
        return program

    def _call_of(self, key: Hashable) -> tuple[Any, tuple[Any, ...], dict[str, Any], Any]:
        """The jitted function of a program, its inputs, those that are static, and what it returns."""
        if key == JOIN:
            return self._join, (self._state, self.batches.joins(())), {}, self._state
        if key == JOIN_RULES:
            return self._rules, (self._state, *self.batches.rules(())), {}, self._state
        if key == COPY_PAGES:
            return self._copy, (self._state, self.batches.copies(())), {}, self._state
        if isinstance(key, PickShape):
            return self._pick_of(key)
        assert isinstance(key, StepShape)
        nothing = StepPlan(step_id=-1)
        if self.buckets.tile_rows is not None:
            return self._tile, (self.weights, self._state, *self.batches.tiles(nothing, key)), {}, self._state
        decode, prefill = self.batches.decode(nothing, key), self.batches.prefill(nothing, key)
        inputs = (self.weights, self._state, decode)
        if key.is_fused:
            static = {"num_steps": key.num_decode_steps, "table_len": key.table_len}
            return self._decode, inputs, static, (self._state, 0)
        return self._forward, inputs if prefill is None else (*inputs, prefill), {}, self._state

    def _pick_of(self, shape: PickShape) -> tuple[Any, tuple[Any, ...], dict[str, Any], Any]:
        """See `_call_of`."""
        num, inputs = shape.num_rows, (self.weights, self._state, self.batches.pick((), shape))
        if shape.is_plain:
            return self._pick, inputs, {}, (self._state, 0)
        more = self.batches.masks({}, num), self.batches.targets((), num)
        some: Any = 0
        outputs = split.PickOutputs(Logprobs(some, some, some, some, some), some, some)
        return self._pick_processed, (*inputs, *more), {}, (self._state, 0, outputs)

    def _cache_of(self, key: Hashable) -> ProgramCache | None:
        """Where a program is kept; a processor's function may change without its shapes, so those are not."""
        is_theirs = bool(self.processors) and isinstance(key, PickShape) and not key.is_plain
        return None if is_theirs else self._cache

    def _load(self, key: Hashable) -> Any | None:
        """The program as an earlier process compiled it."""
        cache = self._cache_of(key)
        if cache is None:
            return None
        _, inputs, _, outputs = self._call_of(key)
        return cache.load(key, jax.tree.structure((inputs, {})), jax.tree.structure(outputs))

    def _lower(self, key: Hashable) -> tuple[Any, bool]:
        """A lowered program, and whether all of its ops run as they should."""
        function, inputs, static, _ = self._call_of(key)
        num_fallbacks = backend.num_fallbacks()
        lowered = function.lower(*inputs, **static)
        return lowered, backend.num_fallbacks() == num_fallbacks

    def _compile(self, key: Hashable, lowered: Any, is_sound: bool) -> Any:
        cache = self._cache_of(key)
        with jax_cache_hits() as hits:
            program = lowered.compile()
        # Tracing says what falls back, so it is traced at each start. A CPU's program that JAX read from its own cache
        # has lost its machine code to a second saving: it would be read, and fail when it runs.
        is_whole = not hits or jax.default_backend() != "cpu"
        if cache is not None and is_sound and is_whole:
            cache.save(key, program)
        return program

    # -- ahead of time ------------------------------------------------------------------------------------

    def compile_all(self, progress: Callable[[], None] | None = None) -> None:
        """Compiles everything that is not compiled yet; `progress` is called after each program, from any thread.

        Programs on disk are read in threads. Tracing holds the interpreter, so the others are traced here, one after
        the other, and XLA compiles them in threads meanwhile.
        """
        missing = [key for key in self.keys() if key not in self._programs]
        with ThreadPoolExecutor(min(MAX_COMPILE_THREADS, os.cpu_count() or 1), "turbojax-compile") as threads:
            running: dict[Hashable, Future[Any]] = {key: threads.submit(self._load, key) for key in missing}
            for key in missing:
                if running[key].result() is None:
                    running[key] = threads.submit(self._compile, key, *self._lower(key))
                else:
                    self.metrics.num_programs_read += 1
                if progress is not None:
                    running[key].add_done_callback(lambda future: progress())
            for key, future in running.items():
                self._programs[key] = future.result()
                self.metrics.num_compilations += 1
        self.is_complete = True
        if self._cache is not None:
            self._cache.touch()

    def workspace_bytes(self) -> int:
        """The most memory that any program that is compiled takes beside weights and state: temporaries and outputs."""
        found = [program.memory_analysis() for program in self._programs.values()]
        extra = [a.temp_size_in_bytes + a.output_size_in_bytes - a.alias_size_in_bytes for a in found if a is not None]
        return max(map(int, extra), default=0)
