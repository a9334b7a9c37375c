"""A server on the tiny random model, with a tokenizer of short texts, for scripts that measure the server itself."""

from __future__ import annotations

import itertools
import string
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from turbojax.api import Pipeline
from turbojax.assembly import assemble_model
from turbojax.configs import EngineConfig
from turbojax.models.random_model import random_model
from turbojax.program_cache import use_compilation_cache
from turbojax.serve.app import create_app
from turbojax.serve.server import background_server
from turbojax.serve.service import Service
from turbojax.serve.settings import ServeConfig
from turbojax.tokenizer import Tokenizer

SHAPE, VOCAB_SIZE = "tiny", 512
LETTERS = string.ascii_lowercase[:8]  # any two of them are a token
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def short_texts() -> Tokenizer:
    """Two letters a token, so that a text says how many tokens it has."""
    from tokenizers import Regex, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as Backend
    from transformers import PreTrainedTokenizerFast

    pairs = itertools.product(string.ascii_lowercase, repeat=2)
    vocabulary = {a + b: token for token, (a, b) in enumerate(itertools.islice(pairs, VOCAB_SIZE))}
    backend = Backend(models.WordLevel(vocabulary, unk_token="aa"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(".."), "isolated")
    backend.decoder = decoders.Fuse()
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend), TEMPLATE)


def open_pipeline(**engine: Any) -> Pipeline:
    """The tiny model with everything compiled before the first request; nothing but its length ends an answer."""
    small = {"dtype": "float32", "session_len": 512, "max_batch_size": 64, "compile_ahead": True}
    config = EngineConfig(**small | engine)
    use_compilation_cache()
    parts = assemble_model(random_model(SHAPE, "bf16", config.dtype, config.kv_bits), config)
    return Pipeline(
        parts.runner, parts.scheduler, short_texts(), vocab_size=VOCAB_SIZE, eos_ids=(), memory=parts.memory
    )


@contextmanager
def serving(pipe: Pipeline, **options: Any) -> Iterator[tuple[str, Service]]:
    """(base url with its /v1, service) of a server in a thread of this process, as `api_server` would run it."""
    config = ServeConfig(server_port=0, **options)
    service = Service(pipe, config, SHAPE)
    with background_server(create_app(service), config) as url:
        yield f"{url}/v1", service
