"""Loads: synthetic ones, files with good and bad lines, arrivals."""

import json

import numpy as np
import pytest

from turbojax.bench.errors import BenchError
from turbojax.bench.load import arrival_times, read_load, synthetic_load


def write(path, *lines):
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return path


def test_a_synthetic_load_is_repeatable_and_its_prompts_differ():
    load = synthetic_load(3, 20, 5, vocab_size=100, seed=1)
    assert [(len(r.prompt_ids), r.num_new_tokens) for r in load] == [(20, 5)] * 3
    assert load[0].prompt_ids.dtype == np.int32
    assert max(r.prompt_ids.max() for r in load) < 100
    again, other = synthetic_load(3, 20, 5, vocab_size=100, seed=1), synthetic_load(3, 20, 5, vocab_size=100, seed=2)
    assert all(np.array_equal(a.prompt_ids, b.prompt_ids) for a, b in zip(load, again, strict=True))
    assert not np.array_equal(load[0].prompt_ids, other[0].prompt_ids)
    assert not np.array_equal(load[0].prompt_ids, load[1].prompt_ids)
    assert not np.array_equal(
        load[0].prompt_ids[:8], synthetic_load(3, 21, 5, vocab_size=100, seed=1)[0].prompt_ids[:8]
    )


def test_a_file_has_lengths_token_ids_and_texts(tmp_path):
    lines = (
        {"input_len": 9, "output_len": 2},
        "",
        {"token_ids": [4, 7], "output_len": 3},
        {"prompt": "ab", "output_len": 1},
    )
    path = write(tmp_path / "load.jsonl", *lines)
    load = read_load(path, vocab_size=50, encode=lambda text: [ord(c) - 90 for c in text])
    assert [(len(r.prompt_ids), r.num_new_tokens) for r in load] == [(9, 2), (2, 3), (2, 1)]
    assert [r.prompt_ids.tolist() for r in load[1:]] == [[4, 7], [7, 8]]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "line 2: Expecting"),
        ([1], "a JSON object is expected, not list"),
        ({"input_len": 3}, r"output_len are expected, found \['input_len'\]"),
        ({"input_len": 3, "token_ids": [1], "output_len": 1}, "one of input_len, token_ids, prompt"),
        ({"input_len": 3, "output_len": 1, "n": 2}, "found"),
        ({"input_len": 0, "output_len": 1}, "input_len: 0, an integer >= 1"),
        ({"input_len": 3, "output_len": True}, "output_len: True, an integer >= 1"),
        ({"token_ids": [], "output_len": 1}, "token_ids"),
        ({"token_ids": [50], "output_len": 1}, r"integers of 0 \.\. 49"),
        ({"prompt": "text", "output_len": 1}, "no tokenizer"),
    ],
)
def test_a_broken_line_is_named(tmp_path, line, reason):
    path = write(tmp_path / "load.jsonl", {"input_len": 9, "output_len": 2}, line)
    with pytest.raises(BenchError, match=reason) as caught:
        read_load(path, vocab_size=50)
    assert f"{path}, line 2: " in str(caught.value)


def test_an_empty_file_is_no_load(tmp_path):
    with pytest.raises(BenchError, match="has no requests"):
        read_load(write(tmp_path / "load.jsonl", "", ""), vocab_size=50)


def test_arrivals_are_as_far_apart_as_the_rate_says():
    times = arrival_times(4000, rate=8.0, seed=0)
    gaps = np.diff(times, prepend=0.0)
    assert gaps.min() > 0
    assert gaps.mean() == pytest.approx(1 / 8, rel=0.05)
    assert gaps.std() == pytest.approx(1 / 8, rel=0.05), "exponential: as wide as long"


@pytest.mark.parametrize("rate", [0.0, -1.0, float("inf"), float("nan")])
def test_a_rate_is_positive(rate):
    with pytest.raises(BenchError, match="rate"):
        arrival_times(3, rate)
