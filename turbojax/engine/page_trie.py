"""Pages by the tokens that they hold: a trie whose nodes are page-sized chunks, compared exactly."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Hashable

import numpy as np

from turbojax.engine.block_pool import BlockPool

TOKEN_BYTES = 4


def key_of(token_ids: np.ndarray) -> bytes:
    """Tokens as big-endian int32: dictionaries find them by hash and compare them exactly, and order goes by token."""
    return token_ids.astype(">i4").tobytes()


def num_common_tokens(a: bytes, b: bytes) -> int:
    """Leading tokens that two keys share."""
    size = min(len(a), len(b))
    differing = int.from_bytes(a[:size], "big") ^ int.from_bytes(b[:size], "big")
    return (size - (differing.bit_length() + 7) // 8) // TOKEN_BYTES


class Node:
    """The page of a chunk of tokens behind those of the nodes above it; a root stands for none, with the sink's page.

    A chunk shorter than a page is the beginning of one: it is still being filled, or its sequence ended there.
    """

    __slots__ = ("children", "is_dead", "key", "order", "page_id", "parent")

    def __init__(self, key: Hashable, page_id: int, parent: Node | None) -> None:
        self.key, self.page_id, self.parent = key, page_id, parent
        self.children: dict[bytes, Node] = {}
        self.order: list[bytes] = []  # keys of the children, sorted
        self.is_dead = False  # it is not in the trie any more

    def closest(self, key: bytes) -> tuple[Node | None, int]:
        """The child that shares the most leading tokens with `key`, and how many: it is a neighbour in the order."""
        at = bisect_left(self.order, key)
        best, num_best = None, 0
        for neighbour in self.order[max(0, at - 1) : at + 1]:
            num_tokens = num_common_tokens(neighbour, key)
            if num_tokens > num_best:
                best, num_best = self.children[neighbour], num_tokens
        return best, num_best


class PageTrie:
    """Nodes by page and by what leads to them. The pool keeps exactly the pages that are in here."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._roots: dict[Hashable, Node] = {}  # those with children
        self._nodes: dict[int, Node] = {}

    def __len__(self) -> int:
        return len(self._nodes)

    def root(self, name: Hashable) -> Node | None:
        """Where the sequences of one kind begin, if there are any."""
        return self._roots.get(name)

    def grow(self, name: Hashable) -> Node:
        """The root of that name; the caller inserts into it."""
        return self._roots.setdefault(name, Node(name, 0, None))

    def node(self, page: int) -> Node | None:
        return self._nodes.get(page)

    def insert(self, parent: Node, key: bytes, page: int) -> Node:
        """Hangs a held page under a node that has no such child."""
        assert not parent.is_dead
        node = parent.children[key] = self._nodes[page] = Node(key, page, parent)
        insort(parent.order, key)
        self._pool.keep(page)
        return node

    def remove(self, node: Node) -> None:
        """Takes a node out, and all that hang on it: they could not be found any more."""
        parent = node.parent
        assert parent is not None
        assert isinstance(node.key, bytes)
        del parent.children[node.key]
        del parent.order[bisect_left(parent.order, node.key)]
        if parent.parent is None and not parent.children:
            parent.is_dead = True
            del self._roots[parent.key]
        dead = [node]
        for node in dead:  # grows
            node.is_dead = True
            if node.children:
                dead += node.children.values()
            del self._nodes[node.page_id]
            self._pool.drop(node.page_id)

    def evict(self, page: int, group: int) -> None:
        """Takes out an idle page that the pool hands out."""
        self.remove(self._nodes[page])

    def clear(self) -> None:
        for root in list(self._roots.values()):
            for child in list(root.children.values()):
                self.remove(child)

    def check_integrity(self) -> None:
        """Every page is in one place, can be found by its tokens, and is kept in the pool; no other page is."""
        below, pages = list(self._roots.values()), list[int]()
        for root in below:
            assert root.children, "a root without children stays"
        while below:
            node = below.pop()
            assert node.order == sorted(node.children), "the order of the children is not theirs"
            assert not node.is_dead
            below += node.children.values()
            pages += [child.page_id for child in node.children.values()]
            for key, child in node.children.items():
                assert (child.key, child.parent) == (key, node)
                assert self._nodes[child.page_id] is child
                is_full = len(key) == self._pool.page_len * TOKEN_BYTES
                assert is_full or not child.children, "pages hang on one that is not full"
        assert len(pages) == len(self._nodes), "a page is in the trie twice, or cannot be found"
        assert set(pages) == self._pool.kept_pages(), "the pool keeps other pages than those of the trie"
