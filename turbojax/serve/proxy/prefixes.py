"""Which nodes have seen the beginning of a prompt: hashes of its blocks, in a table of bounded size."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from hashlib import blake2b

# About 64 tokens of English, a page of the engine's KV cache by default: what is shorter is not shared there either.
BLOCK_BYTES = 256
# 32 KiB, about 8,000 tokens, tell prompts apart; hashing them takes 0.2 ms.
MAX_BLOCKS = 128
NODES_PER_BLOCK = 4
MAX_ENTRIES = 200_000  # about 40 MB

# Of this process alone, so that nobody can make two prompts collide.
_KEY = os.urandom(16)


def block_hashes(salt: str, text: bytes) -> tuple[int, ...]:
    """A hash for each whole block of `text`, of everything up to its end and of `salt`."""
    end = min(len(text) // BLOCK_BYTES, MAX_BLOCKS) * BLOCK_BYTES
    chain = blake2b(salt.encode("utf-8", "surrogatepass"), digest_size=8, key=_KEY)
    hashes = []
    for start in range(0, end, BLOCK_BYTES):
        chain.update(text[start : start + BLOCK_BYTES])
        hashes.append(int.from_bytes(chain.digest()))
    return tuple(hashes)


class PrefixTable:
    """Urls of the nodes that were given each block last, newest first; the blocks unused for longest go first."""

    def __init__(self, max_entries: int = MAX_ENTRIES) -> None:
        self._urls: OrderedDict[int, tuple[str, ...]] = OrderedDict()
        self._max_entries = max_entries

    def __len__(self) -> int:
        return len(self._urls)

    def find(self, hashes: Sequence[int]) -> Iterator[str]:
        """Nodes that have seen the beginning, those that have seen most of it first; one may come again."""
        for block in reversed(hashes):
            yield from self._urls.get(block, ())

    def put(self, hashes: Sequence[int], url: str) -> None:
        """The node is given a prompt with these blocks."""
        for block in reversed(hashes):  # the first block last: it is shared most and should go last
            others = tuple(other for other in self._urls.get(block, ()) if other != url)
            self._urls[block] = (url, *others[: NODES_PER_BLOCK - 1])
            self._urls.move_to_end(block)
        while len(self._urls) > self._max_entries:
            self._urls.popitem(last=False)
