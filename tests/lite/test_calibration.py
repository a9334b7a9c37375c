"""Calibration text: where it comes from, how it is cut, and what is wrong with it."""

import json

import numpy as np
import pytest

from tests.lite.harness import byte_tokenizer
from turbojax.errors import CalibrationError, ConfigError
from turbojax.lite.calibration import Calibration, builtin_text, calibration_ids
from turbojax.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    from transformers import PreTrainedTokenizerFast

    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer()))


def test_the_built_in_text_is_enough_for_the_defaults():
    text = builtin_text()
    assert len(text.encode()) < 300_000
    assert "Emma Woodhouse, handsome, clever, and rich" in text
    assert len(text.split()) > 32 * 512  # a word is a token at least


def test_sequences_follow_each_other(tokenizer):
    ids = calibration_ids(Calibration(calib_samples=3, calib_seqlen=7), tokenizer, 256)
    assert (ids.shape, ids.dtype) == ((3, 7), np.int32)
    assert tokenizer.decode(ids.reshape(-1)) == builtin_text()[:21]


def test_files(tokenizer, tmp_path):
    (tmp_path / "a.txt").write_text("abcdefgh")
    lines = [json.dumps("abc"), "", json.dumps({"text": "de"}), json.dumps({"id": 1, "content": "fgh"})]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    for name in ("a.txt", "a.jsonl"):
        calibration = Calibration(calib_data=tmp_path / name, calib_samples=2, calib_seqlen=4)
        assert tokenizer.decode(calibration_ids(calibration, tokenizer, 256).reshape(-1)) == "abcdefgh"


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("a.txt", b"short", r"a.txt: has 5 tokens; 2 samples of 4 need 8"),
        ("a.csv", b"abcdefgh", r"a.csv: calibration data are a .txt or a .jsonl file"),
        ("a.txt", b"\xff\xfe\xff", r"a.txt: cannot be read as UTF-8"),
        ("a.jsonl", b'"abcd"\n{"label": 1}', r"a.jsonl: line 2 is no text"),
        ("a.jsonl", b'"abcd"\n{"text', r"a.jsonl: line 2 is not valid JSON"),
    ],
)
def test_what_is_wrong_with_a_file_is_said(tokenizer, tmp_path, name, content, reason):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CalibrationError, match=reason):
        calibration_ids(Calibration(calib_data=tmp_path / name, calib_samples=2, calib_seqlen=4), tokenizer, 256)


def test_other_ways_to_have_no_text(tokenizer, tmp_path):
    with pytest.raises(CalibrationError, match=r"missing.txt: cannot be read"):
        calibration_ids(Calibration(calib_data=tmp_path / "missing.txt"), tokenizer, 256)
    with pytest.raises(CalibrationError, match="need the package `datasets`"):
        calibration_ids(Calibration(calib_dataset="owner/name"), tokenizer, 256)
    with pytest.raises(CalibrationError, match="no tokenizer"):
        calibration_ids(Calibration(), None, 256)
    with pytest.raises(CalibrationError, match="and the model has 10 tokens"):
        calibration_ids(Calibration(calib_samples=1, calib_seqlen=64), tokenizer, 10)


@pytest.mark.parametrize("field", ["calib_samples", "calib_seqlen", "batch_size"])
def test_sizes_are_checked(field):
    with pytest.raises(ConfigError, match=rf"Calibration.{field} is 0; accepted: an integer from 1 on"):
        Calibration(**{field: 0})
