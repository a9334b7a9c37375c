"""Time that the host needs for guides: `python scripts/bench_guides.py [model]`; the default model without one.

Microseconds of one thread's own time: making a guide whose grammar or words are new, making the same again, and the
median and longest mask along a text that the guide allows.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence

from turbojax.engine.bad_words import BadWords
from turbojax.engine.guides import Guide
from turbojax.guided import GuideCompiler
from turbojax.hub import resolve_model
from turbojax.tokenizer import load_tokenizer
from turbojax.vocabulary import vocabulary_of

FIELDS = [f"field{i}" for i in range(8)]
SCHEMA = {
    "type": "object",
    "properties": {name: {"type": "string"} for name in FIELDS},
    "required": FIELDS,
    "additionalProperties": False,
}
TEXT = json.dumps(dict.fromkeys(FIELDS, "some words about nothing in particular"))
WORDS = ("hello world", "damn", " the end", "foo")


def measure(name: str, make: Callable[[], Guide], token_ids: Sequence[int]) -> None:
    made = []
    for _ in range(2):
        start = time.thread_time()
        guide = make()
        made.append(time.thread_time() - start)
    masks = []
    for token in token_ids:
        start = time.thread_time()
        guide.mask()
        masks.append(time.thread_time() - start)
        guide.advance([token])
    figures = (*made, statistics.median(masks), max(masks))
    print(f"{name:12}", *(f"{figure * 1e6:12,.0f}" for figure in figures))


def main() -> None:
    tokenizer = load_tokenizer(resolve_model(sys.argv[1] if len(sys.argv) > 1 else None))
    assert tokenizer is not None, "the model has no tokenizer"
    size = tokenizer.vocab_size
    compiler = GuideCompiler(tokenizer, size, () if tokenizer.eos_id is None else (tokenizer.eos_id,))
    vocabulary, ids = (
        vocabulary_of(tokenizer, skip_special_tokens=True),
        tokenizer.encode(TEXT, add_special_tokens=False),
    )
    print(f"{size:,} tokens", f"{'new':>10} {'again':>12} {'median mask':>12} {'longest mask':>12}")
    measure("json schema", lambda: compiler.guide({"type": "json_schema", "json_schema": SCHEMA}), ids)
    measure("pattern", lambda: compiler.guide({"type": "regex_schema", "regex_schema": r"\{.*\}"}), ids)
    measure("bad words", lambda: BadWords(WORDS, vocabulary, size), ids)


if __name__ == "__main__":
    main()
