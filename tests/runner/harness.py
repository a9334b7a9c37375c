"""Pipelines on small models, and what XLA compiles in this process."""

from __future__ import annotations

from contextlib import contextmanager

import jax

from turbojax.api import Pipeline
from turbojax.assembly import assemble, assemble_model
from turbojax.configs import EngineConfig, GenerationConfig

GREEDY = GenerationConfig(max_new_tokens=16)
# Few buckets, since each takes seconds to compile: 4 of decode, 1 of prefill, 1 mixed.
SMALL = {"max_batch_size": 2, "max_prefill_token_num": 32, "cache_block_seq_len": 16, "session_len": 128}


def open_pipe(model, **config):
    """A pipeline on a checkpoint's path or a loaded model, without a tokenizer, and its parts."""
    config = EngineConfig(**(SMALL | config))
    parts = assemble(model, config) if hasattr(model, "joinpath") else assemble_model(model, config)
    pipe = Pipeline(
        parts.runner, parts.scheduler, None, vocab_size=parts.model.spec.vocab_size, eos_ids=(),
        processors=config.logits_processors,
    )  # fmt: skip
    return pipe, parts


@contextmanager
def compilations():
    """The durations of everything that XLA compiles meanwhile, or finds in its cache."""
    found = []

    def heard(event, duration, **_):
        if event == "/jax/core/compile/backend_compile_duration":
            found.append(duration)

    jax.monitoring.register_event_duration_secs_listener(heard)
    try:
        yield found
    finally:
        jax.monitoring.unregister_event_duration_listener(heard)
