"""Calibration tokens: from the text that comes along, from a file, or from a Hugging Face data set."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources
from itertools import islice
from pathlib import Path

import numpy as np

from turbojax.errors import CalibrationError, ConfigError
from turbojax.tokenizer import Tokenizer

BUILTIN = "builtin"  # the opening of Jane Austen's Emma (1815), in the public domain
TEXT_FIELDS = ("text", "content", "prompt")
CHARS_PER_TOKEN = 8  # more than any tokenizer's average: bounds how much of a data set is read


@dataclass(frozen=True)
class Calibration:
    """Which tokens calibration runs on; the names are LMDeploy's.

    Attributes:
        calib_dataset: "builtin", or the name of a Hugging Face data set (with `datasets` installed).
        calib_data: a .txt or .jsonl file instead.
        calib_samples: sequences.
        calib_seqlen: tokens of each.
        batch_size: sequences that run at once; only memory and speed depend on it.
    """

    calib_dataset: str = BUILTIN
    calib_data: Path | None = None
    calib_samples: int = 32
    calib_seqlen: int = 512
    batch_size: int = 4

    def __post_init__(self) -> None:
        for name in ("calib_samples", "calib_seqlen", "batch_size"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ConfigError("Calibration", name, value, "an integer from 1 on")
        if self.calib_data is not None and self.calib_dataset != BUILTIN:
            raise ConfigError("Calibration", "calib_data", str(self.calib_data), "none beside a calib_dataset")

    @property
    def origin(self) -> str:
        return str(self.calib_data) if self.calib_data is not None else self.calib_dataset


def calibration_ids(calibration: Calibration, tokenizer: Tokenizer | None, vocab_size: int) -> np.ndarray:
    """Token ids, int32 [samples, seqlen]: the text's tokens from the start, cut into sequences that do not overlap.

    Raises:
        CalibrationError: there is no tokenizer, the text cannot be read, or has too few tokens; says how many.
    """
    if tokenizer is None:
        raise CalibrationError("the checkpoint has no tokenizer, so that calibration text means nothing to it")
    wanted = calibration.calib_samples * calibration.calib_seqlen
    found: list[int] = []
    for text in texts(calibration, wanted):
        found += tokenizer.encode(text, add_special_tokens=False)
        if len(found) >= wanted:
            break
    if len(found) < wanted:
        raise CalibrationError(
            f"{calibration.origin}: has {len(found)} tokens; {calibration.calib_samples} samples of "
            f"{calibration.calib_seqlen} need {wanted}: give a longer text, or lower calib_samples or calib_seqlen"
        )
    ids = np.asarray(found[:wanted], np.int32).reshape(calibration.calib_samples, calibration.calib_seqlen)
    if int(ids.max()) >= vocab_size:
        raise CalibrationError(f"the tokenizer gives id {int(ids.max())}, and the model has {vocab_size} tokens")
    return ids


def texts(calibration: Calibration, num_tokens: int) -> Iterator[str]:
    """The texts, as many as are asked for."""
    if calibration.calib_data is not None:
        return file_texts(calibration.calib_data)
    if calibration.calib_dataset == BUILTIN:
        return iter([builtin_text()])
    return dataset_texts(calibration.calib_dataset, num_tokens)


def builtin_text() -> str:
    return (resources.files("turbojax.lite") / "data" / "calibration.txt").read_text(encoding="utf-8")


def file_texts(path: Path) -> Iterator[str]:
    """The text of a .txt file, or of each line of a .jsonl file.

    Raises:
        CalibrationError: it cannot be read, or a line has no text; names the line.
    """
    if path.suffix not in (".txt", ".jsonl"):
        raise CalibrationError(f"{path}: calibration data are a .txt or a .jsonl file")
    try:
        whole = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CalibrationError(f"{path}: cannot be read as UTF-8 text: {error}") from error
    if path.suffix == ".txt":
        yield whole
        return
    for number, line in enumerate(whole.splitlines(), start=1):
        if line.strip():
            yield line_text(path, number, line)


def line_text(path: Path, number: int, line: str) -> str:
    """The text of one JSON line: a string, or an object with one of TEXT_FIELDS."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise CalibrationError(f"{path}: line {number} is not valid JSON ({error})") from error
    if isinstance(value, dict):
        value = next((value[name] for name in TEXT_FIELDS if name in value), None)
    if not isinstance(value, str):
        fields = ", ".join(repr(name) for name in TEXT_FIELDS)
        raise CalibrationError(f"{path}: line {number} is no text: a string is expected, or an object with {fields}")
    return value


def dataset_texts(name: str, num_tokens: int) -> Iterator[str]:
    """The training texts of a Hugging Face data set ("owner/name" or "owner/name:config").

    Raises:
        CalibrationError: `datasets` is not installed, or the data set cannot be read or has no text.
    """
    if importlib.util.find_spec("datasets") is None:
        raise CalibrationError(
            f"calib_dataset is {name!r}, and data sets need the package `datasets`: pip install datasets, "
            "or give a text of your own with --calib-data, or leave both out for the built-in text"
        )
    import datasets

    path, _, config = name.partition(":")
    try:
        rows = datasets.load_dataset(path, config or None, split="train", streaming=True)
        num_chars = 0
        for row in islice(rows, 1_000_000):
            text = next((row[field] for field in TEXT_FIELDS if isinstance(row.get(field), str)), None)
            if text is None:
                raise CalibrationError(f"{name}: its rows have none of the fields {', '.join(TEXT_FIELDS)}")
            yield text + "\n"
            num_chars += len(text)
            if num_chars > num_tokens * CHARS_PER_TOKEN:
                return
    except CalibrationError:
        raise
    except Exception as error:  # the package raises errors of many kinds
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise CalibrationError(f"{name}: the data set cannot be read: {first}") from error
