"""The bytes that each token of a tokenizer adds to a text."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from turbojax.engine.bad_words import Vocabulary
from turbojax.errors import TokenizerError

if TYPE_CHECKING:
    from turbojax.tokenizer import Tokenizer

SPACE = "▁"  # how SentencePiece writes one


def vocabulary_of(tokenizer: Tokenizer, *, skip_special_tokens: bool) -> Vocabulary:
    """What each token adds to the text; special tokens that are skipped add nothing.

    Raises:
        TokenizerError: the tokenizer is neither a byte-level nor a SentencePiece one.
    """
    backend, to_bytes = tokenizer.backend, _reader_of(tokenizer)
    added = backend.get_added_tokens_decoder()
    texts = [b""] * backend.get_vocab_size(with_added_tokens=True)
    for piece, token in backend.get_vocab(with_added_tokens=True).items():
        if token < len(texts) and token not in added:
            texts[token] = to_bytes(piece)
    for token, added_token in added.items():
        if token < len(texts) and not (skip_special_tokens and added_token.special):
            texts[token] = added_token.content.encode()
    return Vocabulary(texts)


def token_reader(tokenizer: Tokenizer) -> Callable[[int], bytes]:
    """What a token adds to the text, special ones included; ids beyond the tokenizer's add nothing.

    Raises:
        TokenizerError: see `vocabulary_of`.
    """
    backend, to_bytes = tokenizer.backend, _reader_of(tokenizer)
    added = {token: found.content.encode() for token, found in backend.get_added_tokens_decoder().items()}

    def read(token_id: int) -> bytes:
        if token_id in added:
            return added[token_id]
        piece = backend.id_to_token(token_id)
        return b"" if piece is None else to_bytes(piece)

    return read


def _reader_of(tokenizer: Tokenizer) -> Callable[[str], bytes]:
    """How the pieces of a vocabulary are written, to bytes.

    Raises:
        TokenizerError: see `vocabulary_of`.
    """
    backend = tokenizer.backend
    decoder = {} if backend is None or backend.decoder is None else json.loads(backend.decoder.__getstate__())
    kinds = set(_kinds(decoder))
    if "ByteLevel" in kinds:
        return _byte_level
    if kinds & {"ByteFallback", "Metaspace"}:
        return _sentencepiece
    raise TokenizerError(f"the bytes of its tokens are not known: its decoder is {decoder.get('type', 'none')}")


def _kinds(decoder: Mapping[str, Any]) -> Iterator[str]:
    yield decoder.get("type", "")
    for part in decoder.get("decoders", ()):
        yield from _kinds(part)


def _byte_level(piece: str) -> bytes:
    return bytes(_BYTE_OF[c] for c in piece) if all(c in _BYTE_OF for c in piece) else piece.encode()


def _sentencepiece(piece: str) -> bytes:
    if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
        return bytes.fromhex(piece[3:5])
    return piece.replace(SPACE, " ").encode()


def _byte_characters() -> dict[str, int]:
    """GPT-2's characters for bytes: itself where it can be seen, else the next one from 256 on."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in visible]
    return {chr(b): b for b in visible} | {chr(256 + i): b for i, b in enumerate(hidden)}


_BYTE_OF = _byte_characters()
