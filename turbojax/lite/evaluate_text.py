"""A text as token ids: the user's own file, or the one that comes with the package."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from turbojax.errors import LiteError, MissingTokenizerError
from turbojax.lite.calibration import builtin_text
from turbojax.tokenizer import load_tokenizer


def read_text(path: Path | None) -> str:
    """The text of a file; None is the built-in one, out of books whose copyright has ended.

    Raises:
        LiteError: the file is not UTF-8.
        OSError: it cannot be read.
    """
    if path is None:
        return builtin_text()
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise LiteError(f"{path}: is no UTF-8 text (byte {error.start}); convert it first") from error


def token_ids_of(model: Path, text: Path | None) -> np.ndarray:
    """int32 [T], a whole text in the tokens of a model, without a start token.

    Raises:
        MissingTokenizerError: the model has no tokenizer.
        LiteError, TokenizerError: text or tokenizer are broken.
    """
    tokenizer = load_tokenizer(model)
    if tokenizer is None:
        raise MissingTokenizerError(f"{model}: has no tokenizer, which a text needs; add tokenizer.json to the folder")
    return np.asarray(tokenizer.encode(read_text(text), add_special_tokens=False), np.int32)
