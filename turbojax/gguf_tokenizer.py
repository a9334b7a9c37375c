"""The tokenizer that a GGUF file describes in its metadata, built with the `tokenizers` package."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from checkpoints.gguf_file import GgufFile
from turbojax.errors import TokenizerError

CONTROL, USER_DEFINED, BYTE = 3, 4, 6  # kinds in tokenizer.ggml.token_type

# Splitting patterns of the models that these names stand for, as their own tokenizer.json files state them.
LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2_SPLIT = LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")


def gguf_tokenizer(path: Path) -> Any:
    """A transformers fast tokenizer with the file's special tokens and chat template.

    Raises:
        TokenizerError: the file has no tokenizer, or one of a kind that is not supported.
    """
    from transformers import PreTrainedTokenizerFast

    meta = GgufFile(path).metadata
    kind = meta.get("tokenizer.ggml.model")
    if kind not in ("gpt2", "llama"):
        raise TokenizerError(f"{path}: tokenizer.ggml.model is {kind!r}; supported: 'gpt2', 'llama'")
    if not isinstance(meta.get("tokenizer.ggml.tokens"), list):
        raise TokenizerError(
            f"{path}: tokenizer.ggml.tokens is missing or is no list of texts; convert the model again"
        )
    tokens: list[str] = list(meta["tokenizer.ggml.tokens"])
    kinds = [int(k) for k in meta.get("tokenizer.ggml.token_type", [1] * len(tokens))]
    inner = byte_level_bpe(path, meta, tokens) if kind == "gpt2" else sentencepiece(path, meta, tokens, kinds)
    add_special_tokens(inner, tokens, kinds)
    bos, eos, pad, unk = (special(meta, tokens, name) for name in ("bos", "eos", "padding", "unknown"))
    add_end_tokens(inner, meta, bos, eos, kind)
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token=bos, eos_token=eos, pad_token=pad, unk_token=unk,
        chat_template=meta.get("tokenizer.chat_template"), clean_up_tokenization_spaces=False,
    )  # fmt: skip


def special(meta: dict[str, Any], tokens: list[str], name: str) -> str | None:
    index = meta.get(f"tokenizer.ggml.{name}_token_id")
    return None if index is None or not 0 <= index < len(tokens) else tokens[index]


def byte_level_bpe(path: Path, meta: dict[str, Any], tokens: list[str]) -> Any:
    """GPT-2's kind: BPE over bytes shown as characters; `tokenizer.ggml.pre` names how text is split first."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    def split(pattern: str) -> list[Any]:
        return [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]

    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    splitters: dict[str, Callable[[], list[Any]]] = {
        "smollm": lambda: [pre_tokenizers.Digits(individual_digits=True), byte_level],
        "gpt-2": lambda: [byte_level],
        "default": lambda: [byte_level],
        "llama-bpe": lambda: split(LLAMA3_SPLIT),
        "qwen2": lambda: split(QWEN2_SPLIT),
    }
    name = meta.get("tokenizer.ggml.pre", "default")
    if name not in splitters:
        raise TokenizerError(f"{path}: tokenizer.ggml.pre is {name!r}; supported: {', '.join(sorted(splitters))}")
    merges = [tuple(m.split(" ", 1)) for m in meta.get("tokenizer.ggml.merges", ())]
    # Llama 3 takes whole words that are tokens without merging them up.
    vocab = {token: i for i, token in enumerate(tokens)}
    try:
        bpe = models.BPE(vocab=vocab, merges=merges, ignore_merges=name == "llama-bpe")
    except Exception as error:  # the package raises plain Exception for a merge that names no token
        raise TokenizerError(f"{path}: tokenizer.ggml.merges: {error}; convert the model again") from error
    inner = Tokenizer(bpe)
    inner.pre_tokenizer = pre_tokenizers.Sequence(splitters[name]())
    inner.decoder = decoders.ByteLevel()
    return inner


def sentencepiece(path: Path, meta: dict[str, Any], tokens: list[str], kinds: list[int]) -> Any:
    """Llama 2's kind: SentencePiece BPE with byte fallback; merges follow from the pieces' scores."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    scores = meta.get("tokenizer.ggml.scores")
    if scores is None or len(scores) != len(tokens):
        raise TokenizerError(f"{path}: tokenizer.ggml.scores must have one value for each of {len(tokens)} tokens")
    vocab = {token: i for i, token in enumerate(tokens)}
    inner = Tokenizer(
        models.BPE(vocab=vocab, merges=merges_of(vocab, scores, kinds), fuse_unk=True, byte_fallback=True,
                   unk_token=special(meta, tokens, "unknown"))
    )  # fmt: skip
    prefix = [normalizers.Prepend("▁")] if meta.get("tokenizer.ggml.add_space_prefix", True) else []
    inner.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", "▁")])
    strip = [decoders.Strip(" ", 1, 0)] if prefix else []
    inner.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    return inner


def merges_of(vocab: dict[str, int], scores: Any, kinds: list[int]) -> list[tuple[str, str]]:
    """Every split of a piece into two pieces, best score of the whole first: what SentencePiece merges by."""
    found = []
    for piece, index in vocab.items():
        if kinds[index] in (CONTROL, BYTE):
            continue
        splits = [(piece[:i], piece[i:]) for i in range(1, len(piece))]
        pairs = [(left, right) for left, right in splits if left in vocab and right in vocab]
        pairs.sort(key=lambda pair: (vocab[pair[0]], vocab[pair[1]]))
        found += [(-float(scores[index]), pair) for pair in pairs]
    found.sort(key=lambda item: item[0])
    return [pair for _, pair in found]


def add_special_tokens(inner: Any, tokens: list[str], kinds: list[int]) -> None:
    """Control tokens are special; user-defined ones are taken whole but are text."""
    from tokenizers import AddedToken

    inner.add_special_tokens([AddedToken(t, special=True) for t, k in zip(tokens, kinds, strict=True) if k == CONTROL])
    inner.add_tokens([AddedToken(t, normalized=False) for t, k in zip(tokens, kinds, strict=True) if k == USER_DEFINED])


def add_end_tokens(inner: Any, meta: dict[str, Any], bos: str | None, eos: str | None, kind: str) -> None:
    """Puts the start token in front of every text and the end token behind it, where the file asks for them.

    Without the key, SentencePiece models and Llama 3 want a start token, as llama.cpp decides it.
    """
    from tokenizers import processors

    starts = kind == "llama" or meta.get("tokenizer.ggml.pre") == "llama-bpe"
    first = bos if meta.get("tokenizer.ggml.add_bos_token", starts) else None
    last = eos if meta.get("tokenizer.ggml.add_eos_token", False) else None
    around = [(token, int(meta[f"tokenizer.ggml.{name}_token_id"])) for token, name in ((first, "bos"), (last, "eos"))
              if token is not None]  # fmt: skip
    if around:
        frame = lambda text: " ".join(part for part in (first, text, last) if part is not None)  # noqa: E731
        inner.post_processor = processors.TemplateProcessing(
            single=frame("$A"), pair=f"{frame('$A')} {frame('$B')}", special_tokens=list(dict.fromkeys(around))
        )
