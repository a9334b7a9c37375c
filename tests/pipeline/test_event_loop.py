"""What takes long is not done in the event loop: other tasks go on meanwhile."""

import asyncio
import threading

import numpy as np
import pytest

from tests.pipeline.harness import GEN, LETTERS, make
from turbojax.configs import GenerationConfig
from turbojax.errors import EmptyPromptError
from turbojax.request_builder import takes_long

FORMAT = GenerationConfig(response_format={"type": "json_object"})


@pytest.mark.parametrize(
    ("prompts", "config", "want"),
    [
        ("text", None, True),
        ([[1, 2], [3]], GEN, False),
        ([1, 2], GEN, False),
        (np.array([1, 2]), None, False),
        ([{"role": "user", "content": "Hi"}], None, True),
        ([[{"role": "user", "content": "Hi"}]], [GEN], True),
        ([], None, False),
        ([1, 2], FORMAT, True),
        ([[1], [2]], [GEN, FORMAT], True),
        ([1, 2], GenerationConfig(bad_words=["no"]), True),
    ],
)
def test_texts_and_formats_take_long(prompts, config, want):
    assert takes_long(prompts, config) == want


def test_a_text_is_read_in_another_thread(monkeypatch):
    where, read = [], LETTERS.apply_chat_template

    def noting(*args, **how):
        where.append(threading.current_thread())
        return read(*args, **how)

    monkeypatch.setattr(LETTERS, "apply_chat_template", noting, raising=False)
    with make() as pipe:
        response = asyncio.run(pipe.agenerate("ABC", GEN))
    assert response.num_generated_tokens == 12
    assert len(where) == 1
    assert where[0] is not threading.main_thread()


def test_what_is_wrong_raises_where_it_is_awaited():
    with make() as pipe, pytest.raises(EmptyPromptError):
        asyncio.run(pipe.agenerate("", GEN))
