"""What a request's tokens become: text cut at stop words and repetitions, one piece or many, the same in both."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turbojax.engine.request import Progress
from turbojax.engine.stopping import NgramStop, StopRules
from turbojax.engine.text import TextSink
from turbojax.generation import NGRAM_WINDOW_TOKENS

STOP = 0


def decode(token_ids):
    """A letter a token; the stop token shows as an end mark."""
    return "".join("</s>" if t == STOP else chr(96 + t) for t in token_ids)


def say(token_ids, rules, *, whole, num_per_piece=1, reason="length"):
    """What a sink delivers of these tokens, pieces put together, and the tokens that it took."""
    heard, rest = [], list(token_ids)
    sink = TextSink(heard.append, decode, rules, decode_stop=decode, whole=whole)
    while rest:
        piece, rest = rest[:num_per_piece], rest[num_per_piece:]
        if sink(Progress(piece, None if rest else reason)):
            break
    assert [r.finish_reason is None for r in heard] == [True] * (len(heard) - 1) + [False]
    return "".join(r.text for r in heard), [t for r in heard for t in r.token_ids], heard[-1]


def ids(text):
    return [ord(c) - 96 for c in text]


@given(
    st.lists(st.integers(1, 3), min_size=1, max_size=30),
    st.lists(st.text("abc", min_size=1, max_size=3), max_size=2),
    st.booleans(),
    st.integers(0, 5),
    st.integers(1, 4),
)
def test_a_stream_gives_what_a_whole_answer_gives(tokens, words, shows, min_new, num_per_piece):
    rules = StopRules(tuple(words), frozenset([STOP]), min_new, shows_stop=shows)
    whole = say(tokens, rules, whole=True)
    stream = say(tokens, rules, whole=False, num_per_piece=num_per_piece)
    assert stream[:2] == whole[:2]
    assert stream[2].finish_reason == whole[2].finish_reason
    assert stream[2].num_generated_tokens == len(stream[1])


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize(("shows", "text"), [(False, "xab"), (True, "xabcd")])
def test_a_stop_word_is_cut_unless_it_is_asked_for_and_what_follows_it_always(whole, shows, text):
    rules = StopRules(("cd",), shows_stop=shows)
    said, token_ids, last = say(ids("xabcdef"), rules, whole=whole, num_per_piece=7)
    assert (said, token_ids, last.finish_reason) == (text, ids("xabcd"), "stop")


@pytest.mark.parametrize("words", [(), ("zz",)])
@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize(("shows", "text"), [(False, "ab"), (True, "ab</s>")])
def test_the_text_of_a_stop_token_is_left_out_unless_it_is_asked_for(words, whole, shows, text):
    rules = StopRules(words, frozenset([STOP]), shows_stop=shows)
    said, token_ids, _ = say([*ids("ab"), STOP], rules, whole=whole, reason="stop")
    assert (said, token_ids) == (text, [*ids("ab"), STOP])


@pytest.mark.parametrize("whole", [False, True])
def test_repetition_ends_the_text_at_the_token_that_completes_it(whole):
    rules = StopRules(ngram_size=2, ngram_threshold=3)
    said, token_ids, last = say(ids("xabyabzabab"), rules, whole=whole, num_per_piece=4)
    assert (said, last.finish_reason) == ("xabyabzab", "stop")
    assert token_ids == ids("xabyabzab")


@pytest.mark.parametrize("whole", [False, True])
def test_tokens_of_the_prompt_that_the_cache_had_are_told(whole):
    heard = []
    sink = TextSink(heard.append, decode, prompt_ids=range(9), whole=whole)
    sink(Progress([1], None, None, 5))
    sink(Progress([2], "length", None, 5))
    assert {(r.num_input_tokens, r.num_cached_tokens) for r in heard} == {(9, 5)}
    assert len(heard) == (1 if whole else 2)


def test_repetition_waits_for_min_new_tokens_and_lets_go_of_text_held_for_a_stop_word():
    rules = StopRules(("ax",), min_new_tokens=5, ngram_size=1, ngram_threshold=2)
    assert say(ids("aaaaaaaa"), rules, whole=False)[0] == "aaaaaa"


@given(st.lists(st.integers(0, 2), max_size=40), st.integers(1, 4), st.integers(2, 5))
def test_repetition_is_found_where_a_search_of_the_whole_finds_it(tokens, size, threshold):
    stop, got = NgramStop(size, threshold), None
    for i, token in enumerate(tokens):
        if stop.push(token) and got is None:
            got = i
    runs = [tuple(tokens[i : i + size]) for i in range(len(tokens) - size + 1)]
    ends = [i for i in range(len(runs)) if runs[: i + 1].count(runs[i]) >= threshold]
    assert got == (ends[0] + size - 1 if ends else None)


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("is_inside", [True, False])
def test_repetition_is_looked_for_in_the_newest_tokens_alone(size, is_inside):
    stop, run = NgramStop(size, 2), [-1, -2, -3][:size]
    num_between = NGRAM_WINDOW_TOKENS - 2 * size + (not is_inside)
    assert not any(stop.push(token) for token in [*run, *range(num_between), *run[:-1]])
    assert stop.push(run[-1]) == is_inside
    assert len(stop._counts) <= NGRAM_WINDOW_TOKENS
