"""Streaming text equals the text of the whole sequence, whatever the pieces."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from turbojax.engine.detokenizer import Detokenizer
from turbojax.engine.stopping import StopWords


def decode(token_ids):
    """A byte-level decoder: token i is byte i."""
    return bytes(token_ids).decode("utf-8", errors="replace")


def batched(ids, num):
    return [ids[first : first + num] for first in range(0, len(ids), num)]


@given(st.text(max_size=40), st.data())
def test_pieces_concatenate_to_the_whole(text, data):
    ids = list(text.encode())
    detokenizer, out = Detokenizer(decode), []
    while ids:
        n = data.draw(st.integers(1, 12))
        out.append(detokenizer.push(ids[:n]))
        ids = ids[n:]
    assert all("\ufffd" not in piece for piece in out) or "\ufffd" in text
    assert "".join(out) + detokenizer.flush() == text


# Bytes that start, continue and break characters of three and four bytes.
broken = st.lists(st.sampled_from(list(b"A\x80\xe4\xbd\xa0\xf0\x9f\x98")) | st.integers(0, 255), max_size=40)


@given(broken, st.integers(1, 10))
@example(list(b"\xa0" * 8 + b"\xe4\xbd\xa0"), 1)  # a character behind more broken bytes than are held back
def test_broken_bytes_come_out_exactly_as_the_decoder_shows_them(ids, num_at_once):
    detokenizer, blocks = Detokenizer(decode), batched(ids, num_at_once)
    assert "".join(map(detokenizer.push, blocks)) + detokenizer.flush() == decode(ids)


def test_tokens_that_come_together_are_decoded_together():
    calls = []

    def spy(token_ids):
        calls.append(len(token_ids))
        return decode(token_ids)

    detokenizer = Detokenizer(spy)
    assert [detokenizer.push(part) for part in (b"abcd", b"efgh", b"i")] == ["abcd", "efgh", "i"]
    assert calls == [4, 4, 8, 4, 5, 1]  # the text of a block behind the one before, then of the block alone


def test_skipped_tokens_and_broken_bytes_do_not_grow_the_window():
    lengths = []

    def spy(token_ids):
        lengths.append(len(token_ids))
        return decode([i for i in token_ids if i != 0])

    for ids in ([65] + [0] * 500, [0] * 500, [0x80] * 500):
        Detokenizer(spy).push(ids)
    assert max(lengths) <= 20


def test_a_space_that_the_decoder_strips_at_the_start_stays_inside():
    def strip_first(token_ids):
        return decode(token_ids).removeprefix(" ")

    for num_at_once in (1, 2, 3):
        assert "".join(map(Detokenizer(strip_first).push, batched(b"  a b", num_at_once))) == " a b"


def test_the_window_stays_short():
    lengths = []

    def spy(token_ids):
        lengths.append(len(token_ids))
        return decode(token_ids)

    Detokenizer(spy).push(list(b"abc" * 500))
    assert max(lengths) <= 16


@given(
    st.text("ab", min_size=0, max_size=30),
    st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
    st.data(),
)
def test_text_is_cut_before_the_first_stop_word(text, words, data):
    stop, out, rest = StopWords(words), "", text
    while rest and stop.found is None:
        n = data.draw(st.integers(1, 4))
        out += stop.push(rest[:n])
        rest = rest[n:]
    out += stop.flush()
    ends = [at + len(w) for w in words if (at := text.find(w)) >= 0]
    if not ends:
        assert (out, stop.found) == (text, None)
        return
    assert stop.found in words
    assert text.startswith(out + stop.found)
    assert not any(w in out for w in words)


@pytest.mark.parametrize(("pieces", "shown"), [(["x<", "/s"], ["x", ""]), (["x<", "b>"], ["x", "<b>"])])
def test_what_may_become_a_stop_word_is_held_back(pieces, shown):
    stop = StopWords(["</s>"])
    assert [stop.push(p) for p in pieces] == shown
