"""A tiny random model with a tokenizer and a chat template, pipelines on it, and servers that listen on loopback."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from fastapi import FastAPI

from tests.lite.harness import tiny_model
from tests.pipeline import harness as fakes
from turbojax.api import Pipeline, pipeline
from turbojax.configs import EngineConfig
from turbojax.serve.app import create_app
from turbojax.serve.service import Service
from turbojax.serve.settings import ServeConfig

MODEL_NAME = "tiny"
# Tokens 0 .. 255 are the bytes, in the order of tokenizers' alphabet; these are 256 .. 258.
SPECIAL_TOKENS = ("<|im_end|>", "<|endoftext|>", "<|im_start|>")
END_IDS = [256, 257]
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# All rows of all steps run through one program: each takes seconds to compile.
SMALL = {
    "dtype": "float32", "session_len": 512, "max_batch_size": 2, "max_prefill_token_num": 64,
    "cache_max_entry_count": 129, "cache_block_seq_len": 16, "batch_invariant": True,
}  # fmt: skip


def write_model(folder: Path, chat_template: str | None = CHAT_TEMPLATE) -> Path:
    """Writes a checkpoint of two layers with random weights; text is bytes, `<|im_end|>` ends an answer."""
    tiny_model(folder, with_tokenizer=False, vocab_size=256 + len(SPECIAL_TOKENS), max_position_embeddings=2048)
    byte_tokenizer(chat_template).save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": END_IDS}))
    return folder


def byte_tokenizer(chat_template: str | None = CHAT_TEMPLATE) -> Any:
    """A transformers tokenizer: a token a byte, and three special ones."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token="<|im_end|>", clean_up_tokenization_spaces=False
    )
    tokenizer.add_special_tokens({"additional_special_tokens": list(SPECIAL_TOKENS)})
    tokenizer.chat_template = chat_template
    return tokenizer


def open_tiny(folder: Path, **engine: Any) -> Pipeline:
    """A pipeline on a model of `write_model`, with few programs to compile."""
    return pipeline(folder, EngineConfig(**(SMALL | engine)))


class CharTokenizer:
    """For `fake_pipeline`: any character is one of 50 tokens; a conversation is its texts, one behind the other."""

    has_chat_template, chat_template, backend, bos_id, eos_id = True, "", None, None, fakes.EOS
    takes_tools, template_kwargs, vocab_size = False, frozenset[str](), fakes.VOCAB

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [(ord(c) - 65) % fakes.VOCAB for c in text]

    def decode(self, token_ids: Any, *, skip_special_tokens: bool = True) -> str:
        return "".join(chr(65 + i) for i in token_ids)

    def render_chat(self, messages: Any, *, add_generation_prompt: bool = True, **_: Any) -> str:
        return "".join(f"{m['role']}:{m['content']};" for m in messages)

    def apply_chat_template(self, messages: Any, *, add_generation_prompt: bool = True) -> list[int]:
        return self.encode(self.render_chat(messages))


def fake_pipeline(**how: Any) -> Pipeline:
    """A pipeline on an engine without a device: it starts at once, and its steps take a millisecond."""
    return fakes.make(**({"tokenizer": CharTokenizer(), "session_len": 400, "num_pages": 400} | how))


def service_on(pipe: Pipeline, config: ServeConfig | None = None) -> Service:
    return Service(pipe, config or ServeConfig(server_port=0), MODEL_NAME)


@contextmanager
def serving(app: FastAPI) -> Iterator[str]:
    """The app behind a free port of this machine, in a thread; gives its base url."""
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error", timeout_graceful_shutdown=5))
    ready = threading.Event()
    startup = server.startup

    async def signalling_startup(*args: Any, **kwargs: Any) -> None:
        await startup(*args, **kwargs)
        ready.set()

    server.startup = signalling_startup  # type: ignore[method-assign]
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        assert ready.wait(30), "the server did not start"
        port = server.servers[0].sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(30)
        assert not thread.is_alive(), "the server did not stop"


@contextmanager
def serving_pipe(pipe: Pipeline, config: ServeConfig | None = None) -> Iterator[str]:
    """A server on a pipeline; see `serving`."""
    with serving(create_app(service_on(pipe, config))) as url:
        yield url


def events_of(response: httpx.Response) -> list[Any]:
    """What the events of a stream that ended well hold."""
    events = [event.removeprefix("data: ") for event in response.text.split("\n\n")]
    assert events[-2:] == ["[DONE]", ""]
    return [json.loads(event) for event in events[:-2]]
