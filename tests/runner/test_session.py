"""Sessions on a real engine: a turn that continues from cached pages gives what the whole conversation gives anew."""

import pytest

from tests.runner.harness import open_pipe
from turbojax.configs import GenerationConfig
from turbojax.models.random_model import random_model

NUM_NEW = 9


@pytest.mark.slow
def test_turns_continue_from_pages_and_give_what_the_whole_conversation_gives():
    pipe, _ = open_pipe(random_model("tiny", "bf16", "float32"), num_decode_steps=1)
    alone = GenerationConfig(max_new_tokens=NUM_NEW, cache_salt="finds nothing")
    with pipe:
        session = pipe.session(GenerationConfig(max_new_tokens=NUM_NEW))
        seen = []
        for length in (30, 5, 7):
            prompt = [(7 * i + length) % 500 for i in range(length)]
            num_known = len(seen)
            response = pipe.chat(prompt, session).response
            seen += prompt
            assert response.num_cached_tokens >= (num_known - 1) // 16 * 16
            whole = pipe(seen, alone)
            assert response.token_ids == whole.token_ids
            seen += response.token_ids
        assert session.token_ids.tolist() == seen
        assert response.num_cached_tokens >= 48
