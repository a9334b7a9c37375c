"""Which of several engines has the beginning of a prompt in its cache, as far as is known: a table of bounded size."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from hashlib import blake2b
from typing import Generic, TypeVar

Who = TypeVar("Who", bound=Hashable)

# 64 token ids, or about as many tokens of English: a page of the KV cache by default, and what is shorter is not shared
# there either.
BLOCK_BYTES = 256
# 8,192 tokens tell prompts apart; hashing them takes 0.2 ms.
MAX_BLOCKS = 128
HOLDERS_PER_BLOCK = 4
MAX_ENTRIES = 200_000  # about 40 MB
# An engine with all of MAX_BLOCKS may have so many more than twice the requests of the least busy one: computing that
# much of a prompt again costs as much as several answers, and where many run at once they all wait for it.
SLACK = 8

# Of this process alone, so that nobody can make two prompts collide.
_KEY = os.urandom(16)


def block_hashes(salt: str, data: bytes) -> tuple[int, ...]:
    """A hash for each whole block of a prompt, of everything up to its end and of `salt`."""
    end = min(len(data) // BLOCK_BYTES, MAX_BLOCKS) * BLOCK_BYTES
    chain = blake2b(salt.encode("utf-8", "surrogatepass"), digest_size=8, key=_KEY)
    hashes = []
    for start in range(0, end, BLOCK_BYTES):
        chain.update(data[start : start + BLOCK_BYTES])
        hashes.append(int.from_bytes(chain.digest()))
    return tuple(hashes)


def most_requests(num_blocks: int, fewest: int) -> float:
    """Requests that an engine may have that has so much of a prompt, and still be asked before the least busy one."""
    return fewest + num_blocks / MAX_BLOCKS * (fewest + SLACK)


class PrefixTable(Generic[Who]):
    """Who was given each block last, newest first; the blocks unused for longest go first."""

    def __init__(self, max_entries: int = MAX_ENTRIES) -> None:
        self._holders: OrderedDict[int, tuple[Who, ...]] = OrderedDict()
        self._max_entries = max_entries

    def __len__(self) -> int:
        return len(self._holders)

    def find(self, hashes: Sequence[int], num_requests: Mapping[Who, int]) -> Who | None:
        """The one of `num_requests` that has most of the beginning; the least busy of those that have as much.

        None where nobody has any, or only some who have too much to do already (`most_requests`).

        Args:
            hashes: of the prompt's blocks.
            num_requests: that each one has under way.
        """
        fewest = min(num_requests.values())
        for num_blocks in range(len(hashes), 0, -1):
            holders = [who for who in self._holders.get(hashes[num_blocks - 1], ()) if who in num_requests]
            least = min(holders, key=num_requests.__getitem__, default=None)
            if least is not None and num_requests[least] <= most_requests(num_blocks, fewest):
                return least
        return None

    def put(self, hashes: Sequence[int], who: Who) -> None:
        """Somebody is given a prompt with these blocks."""
        for block in reversed(hashes):  # the first block last: it is shared most and should go last
            others = tuple(other for other in self._holders.get(block, ()) if other != who)
            self._holders[block] = (who, *others[: HOLDERS_PER_BLOCK - 1])
            self._holders.move_to_end(block)
        while len(self._holders) > self._max_entries:
            self._holders.popitem(last=False)
