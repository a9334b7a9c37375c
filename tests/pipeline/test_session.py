"""Sessions: a conversation as the model saw it, token by token, whatever its text would be tokenised to."""

import numpy as np
import pytest

from tests.engine.fake import VOCAB, FakeRunner, continuation
from turbojax.api import Pipeline
from turbojax.configs import GenerationConfig
from turbojax.conversation import Conversation
from turbojax.engine.block_pool import BlockPool
from turbojax.engine.prefix_cache import PrefixCache
from turbojax.engine.scheduler import Scheduler, SchedulerConfig
from turbojax.errors import ConfigError, EmptyPromptError, InvalidPromptError, MissingTokenizerError, PromptTooLongError
from turbojax.hub import default_model
from turbojax.tokenizer import load_tokenizer

PIECES = [*"abcdefghijklmnopqrstuvwxyz", *(f"a{c}" for c in "abcdefghijklmnopqrst"), "\n", ":", "<", ">"]
END = PIECES.index(">")
LEN = 6
GEN = GenerationConfig(max_new_tokens=LEN)


class PairTokenizer:
    """Some pairs of letters are one token: what was generated letter by letter is tokenised to something else."""

    has_chat_template = True

    def encode(self, text, *, add_special_tokens=True):
        ids = []
        while text:
            piece = max((p for p in PIECES if text.startswith(p)), key=len)
            ids.append(PIECES.index(piece))
            text = text[len(piece) :]
        return ids

    def decode(self, token_ids, *, skip_special_tokens=True):
        return "".join(PIECES[i] for i in token_ids)

    def render_chat(self, messages, *, add_generation_prompt=True):
        text = "".join(f"<{m['role'][0]}:{m['content']}>\n" for m in messages)
        return text + "<a:" if add_generation_prompt else text

    def apply_chat_template(self, messages, *, add_generation_prompt=True):
        return self.encode(self.render_chat(messages, add_generation_prompt=add_generation_prompt))


class CountingTokenizer(PairTokenizer):
    """Its template says in front how many messages there are, so what came before changes."""

    def render_chat(self, messages, *, add_generation_prompt=True):
        return "x" * len(messages) + super().render_chat(messages, add_generation_prompt=add_generation_prompt)


def make(tokenizer=None, session_len=200):
    runner, pool = FakeRunner(2, 4), BlockPool(120, 4)
    config = SchedulerConfig(2, session_len, 16, runner.max_prefill_chunks)
    scheduler = Scheduler(config, pool, cache=PrefixCache(pool))
    return Pipeline(runner, scheduler, tokenizer, vocab_size=VOCAB, eos_ids=[END])


def ids_of(text):
    return PairTokenizer().encode(text)


def test_each_turn_continues_the_tokens_of_those_before_and_finds_their_pages():
    with make(PairTokenizer()) as pipe:
        seen, retokenised, num_known = [], 0, 0
        session = pipe.session(GEN)
        for i, prompt in enumerate(["hello", "ab", "ac", "ad", "ae", "af"]):
            assert pipe.chat(prompt, session) is session
            between = f"<u:{prompt}>\n<a:"
            seen += ids_of(between if i == 0 else f">\n{between}")
            response = session.response
            assert response.token_ids == continuation(seen, len(seen) + LEN, [END])
            assert response.num_input_tokens == len(seen)
            assert response.num_cached_tokens >= (num_known - 1) // 4 * 4
            seen += [t for t in response.token_ids if t != END]
            num_known = len(seen)
            assert session.token_ids.tolist() == seen
            retokenised += pipe.tokenizer.encode(response.text) != [t for t in response.token_ids if t != END]
        assert retokenised, "no answer would have been tokenised differently: this test shows nothing"
        assert [prompt for prompt, _ in session.history] == ["hello", "ab", "ac", "ad", "ae", "af"]
        roles = [m["role"] for m in session.messages]
        assert roles == ["user", "assistant"] * 6
        assert session.messages[1]["content"] == session.history[0][1]


def test_a_template_that_changes_what_came_before_is_followed():
    with make(CountingTokenizer()) as pipe:
        session = pipe.chat("hello", gen_config=GEN)
        answer = session.response.text
        pipe.chat("ab", session, GEN)
        assert session.response.num_input_tokens == len(ids_of(f"xxx<u:hello>\n<a:{answer}>\n<u:ab>\n<a:"))


def test_messages_begin_a_conversation_with_a_system_message():
    with make(PairTokenizer()) as pipe:
        system = [{"role": "system", "content": "be"}, {"role": "user", "content": "ab"}]
        session = pipe.chat(system, gen_config=GEN)
        expected = continuation(ids_of("<s:be>\n<u:ab>\n<a:"), len(ids_of("<s:be>\n<u:ab>\n<a:")) + LEN, [END])
        assert session.response.token_ids == expected
        pipe.chat([{"role": "tool", "content": "c"}, {"role": "user", "content": "d"}], session, GEN)
        assert [m["role"] for m in session.messages] == ["system", "user", "assistant", "tool", "user", "assistant"]


@pytest.mark.parametrize("tokenizer", [None, PairTokenizer()])
def test_token_ids_and_plain_text_are_continued_as_they_are(tokenizer):
    with make(tokenizer) as pipe:
        first, second = ([5, 6, 7], [8, 9]) if tokenizer is None else ("fgh", "ij")
        session = pipe.chat(first, gen_config=GEN, do_preprocess=False)
        one = continuation([5, 6, 7], 3 + LEN, [END])
        assert session.response.token_ids == one
        seen = [5, 6, 7, *(t for t in one if t != END), 8, 9]
        pipe.chat(second, session, GEN, do_preprocess=False)
        assert session.response.token_ids == continuation(seen, len(seen) + LEN, [END])
        assert session.messages == []


def test_a_stream_ends_its_turn_and_one_that_is_left_keeps_what_was_said():
    with make(PairTokenizer()) as pipe:
        long = GenerationConfig(max_new_tokens=100, ignore_eos=True)
        session = pipe.chat("hello", gen_config=GEN, stream_response=True)
        assert session.response is None
        pieces = list(session.generator)
        assert session.response.text == "".join(p.text for p in pieces) == session.history[0][1]
        stream = session("ab", long)
        said = [next(stream), next(stream)]
        whole = session("ac", stream_response=False)
        assert session.history[1] == ("ab", "".join(p.text for p in said))
        seen = ids_of("<u:hello>\n<a:") + [t for p in pieces for t in p.token_ids if t != END]
        seen += ids_of(">\n<u:ab>\n<a:") + [t for p in said for t in p.token_ids] + ids_of(">\n<u:ac>\n<a:")
        assert whole.token_ids == continuation(seen, len(seen) + LEN, [END])
        with pipe.session() as other:
            unread = other("hello", long)
        assert list(unread) == []
        assert other.history == []


def test_a_turn_that_fails_leaves_the_session_as_it_was():
    with make(PairTokenizer(), session_len=40) as pipe:
        session = pipe.chat("hello", gen_config=GEN)
        before = session.token_ids.tolist(), session.messages, list(session.history)
        with pytest.raises(PromptTooLongError):
            pipe.chat("b" * 60, session)
        with pytest.raises(InvalidPromptError, match=r"plain text or token ids; .* accepts, messages"):
            pipe.chat([1, 2], session)
        with pytest.raises(EmptyPromptError):
            pipe.chat("", session)
        with pytest.raises(InvalidPromptError, match="the prompt is int"):
            pipe.chat(5, session)
        with pytest.raises(ConfigError, match=r"n is 2; accepted: 1 in a session"):
            pipe.chat("ab", session, GenerationConfig(n=2, do_sample=True))
        pipe._scheduler.endings.take_tokens = None  # not callable: the engine ends
        assert pipe.chat("ab", session, GEN).response.finish_reason == "error"
        assert (session.token_ids.tolist(), session.messages, session.history) == before


def test_messages_need_a_tokenizer():
    with make() as pipe, pytest.raises(MissingTokenizerError):
        pipe.chat([{"role": "user", "content": "x"}])


def test_the_default_models_template_is_continued_without_tokenising_anew():
    """SmolLM2's own template: what it makes of the whole conversation is what the turns together make of it."""
    tokenizer = load_tokenizer(default_model())
    conversation = Conversation(tokenizer, tokenizer.vocab_size, [tokenizer.eos_id])
    prompts, answers = ["What is the sea?", "Why?", "And the \u00fcber-sea?"], ["It is salt  water.", "Nobody knows.\n"]
    messages = []
    for prompt, answer in zip(prompts, [*answers, None], strict=True):
        messages.append({"role": "user", "content": prompt})
        turn = conversation.ask(prompt)
        assert turn.token_ids.tolist() == tokenizer.apply_chat_template(messages)
        if answer is not None:
            ids = tokenizer.encode(answer, add_special_tokens=False)
            conversation.answer(turn, [*ids, tokenizer.eos_id], answer)
            assert np.array_equal(conversation.token_ids[: len(turn.token_ids)], turn.token_ids)
            messages.append({"role": "assistant", "content": answer})
    assert conversation.messages == messages[:-1]
