"""LMDeploy's tokenizer: text to ids and back."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from turbojax import tokenizer
from turbojax.errors import MissingTokenizerError


class Tokenizer:
    """The tokenizer of a model."""

    def __init__(self, model_path: str | Path | tokenizer.Tokenizer) -> None:
        """Of a folder, a .gguf file or a Hugging Face repo id.

        Raises:
            MissingTokenizerError: the checkpoint has none.
            TokenizerError: it cannot be read.
        """
        self._inner = _load(model_path) if isinstance(model_path, str | Path) else model_path

    @property
    def vocab_size(self) -> int:
        return self._inner.vocab_size

    @property
    def bos_token_id(self) -> int | None:
        return self._inner.bos_id

    @property
    def eos_token_id(self) -> int | None:
        return self._inner.eos_id

    def encode(self, s: str, add_bos: bool = True, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text; `add_bos` False leaves out the start token that the model begins texts with."""
        ids = self._inner.encode(s, add_special_tokens=add_special_tokens)
        return ids[1:] if not add_bos and ids[:1] == [self.bos_token_id] else ids

    def decode(self, t: int | Sequence[int], offset: int | None = None, skip_special_tokens: bool = True) -> str:
        """The text of token ids, or of one; of those from `offset` on."""
        ids = [t] if isinstance(t, int) else list(t)
        return self._inner.decode(ids[offset:], skip_special_tokens=skip_special_tokens)


def _load(model: str | Path) -> tokenizer.Tokenizer:
    from turbojax.hub import resolve_model

    path = resolve_model(model)
    found = tokenizer.load_tokenizer(path)
    if found is None:
        raise MissingTokenizerError(f"{path}: the model has no tokenizer")
    return found
