"""Which requests find which pages: what the pool holds of their beginnings, and what they leave behind."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from turbojax.engine.block_pool import BlockPool
from turbojax.engine.page_trie import TOKEN_BYTES, Node, PageTrie, key_of

if TYPE_CHECKING:
    from turbojax.engine.request import Request

# A copy moves a page of every layer. Computing fewer tokens than this share of a page again costs less, and every
# prompt begins like some other one by a token or two.
MIN_COPIED_SHARE = 1 / 4
NEVER = 1 << 62


class Match(NamedTuple):
    """What of a sequence the pool holds: whole pages, and the first `num_copied` tokens of page `source_id`."""

    node: Node | None
    page_ids: list[int]
    source_id: int
    num_copied: int
    num_tokens: int


@dataclass(eq=False, slots=True)
class Trail:
    """A request's place in the trie.

    Attributes:
        keys: of its full pages of known tokens, as far as they were needed.
        node: of the last full page that it entered or was given.
        num_entered_pages: full pages down to there.
        num_shared_pages: leading pages that it was given; the others are its own.
        tail: its last page, which is not full, where that is in the trie.
        next_len: tokens in the pool with which its next page is full.
        awaited: whom it waits for, and how many tokens that one must have in the pool first.
    """

    keys: list[bytes] = field(default_factory=list)
    node: Node | None = None
    num_entered_pages: int = 0
    num_shared_pages: int = 0
    tail: Node | None = None
    next_len: int = NEVER
    awaited: tuple[Request, int] | None = None


class PrefixCache:
    """Which pages begin which sequences; the pool counts who holds them.

    A page enters when the step that filled it is committed and its numbers are finite. It stays when its sequence ends
    or gives way, idle in the pool, until it is the one that nobody has held for longest. Whoever holds a page holds
    those before it and lets go of the last one first, so leaves of the trie go before what they hang on. (Two
    sequences that computed one page at the same time are the exception: the page of the first is in the trie, and
    may go while the second still holds pages behind it; those go from the trie with it, and stay with their holder.)

    Sequences share pages only within one salt and one RoPE regime: the same token has other keys in another one.
    """

    def __init__(
        self, pool: BlockPool, *, is_enabled: bool = True, regime_of: Callable[[int], Hashable] = lambda length: None
    ) -> None:
        """`regime_of` says of a prompt's length what its RoPE makes of it."""
        if is_enabled and pool.num_groups != 1:
            raise ValueError(f"the prefix cache keeps pages of one group, the pool has {pool.num_groups}")
        self.is_enabled, self._pool, self._regime_of = is_enabled, pool, regime_of
        self._page_len, self._page_bytes = pool.page_len, pool.page_len * TOKEN_BYTES
        self._min_copied = max(1, int(pool.page_len * MIN_COPIED_SHARE))
        self._trie = PageTrie(pool)
        if is_enabled:
            pool.evict = self._trie.evict

    @property
    def num_pages(self) -> int:
        """Pages in the trie, held or idle."""
        return len(self._trie)

    # -- finding ------------------------------------------------------------------------------------------

    def find(self, request: Request) -> Match:
        """The longest beginning of a request's known tokens in the pool, its last token left out: that is computed."""
        node = self._trie.root(self._root_key(request)) if self.is_enabled and request.reads_cache else None
        if node is None:
            return Match(None, [], 0, 0, 0)
        page_len, num_tokens = self._page_len, request.num_tokens - 1
        page_ids: list[int] = []
        for key in self.keys_of(request, num_tokens // page_len):
            child = node.children.get(key)
            if child is None:
                break
            page_ids.append(child.page_id)
            node = child
        num_found = len(page_ids) * page_len
        source, num_copied = node.closest(self._key(request, num_found, min(num_tokens, num_found + page_len)))
        if source is None or num_copied < self._min_copied:
            return Match(node, page_ids, 0, 0, num_found)
        return Match(node, page_ids, source.page_id, num_copied, num_found + num_copied)

    def awaits(self, request: Request, match: Match, computing: Collection[Request]) -> bool:
        """Whether one of `computing` is about to have the page in the pool that follows the match."""
        num_pages = len(match.page_ids) + 1
        num_tokens = num_pages * self._page_len
        if not self.is_enabled or not request.reads_cache or num_tokens >= request.num_tokens:
            return False
        keys, root_key = self.keys_of(request, num_pages), self._root_key(request)
        for leader in computing:
            if leader.num_committed_tokens < num_tokens <= leader.num_prefill_tokens and (
                self.keys_of(leader, num_pages) == keys and self._root_key(leader) == root_key
            ):
                request.trail.awaited = leader, self._num_common_full(request, leader)
                return True
        return False

    @staticmethod
    def still_awaits(request: Request, computing: Collection[Request]) -> bool:
        """Whether the one that it was found to await has not come to the end of what they share."""
        if request.trail.awaited is not None:
            leader, num_tokens = request.trail.awaited
            if leader in computing and leader.num_committed_tokens < num_tokens:
                return True
            request.trail.awaited = None
        return False

    def _num_common_full(self, request: Request, leader: Request) -> int:
        """Tokens of the full pages with which both begin, as far as the request has use for them."""
        num_pages = min(request.num_tokens - 1, leader.num_prefill_tokens) // self._page_len
        pairs = zip(self.keys_of(request, num_pages), self.keys_of(leader, num_pages), strict=False)
        num_common = next((i for i, (a, b) in enumerate(pairs) if a != b), num_pages)
        return num_common * self._page_len

    def _root_key(self, request: Request) -> Hashable:
        return request.cache_salt, self._regime_of(len(request.prompt_ids))

    def keys_of(self, request: Request, num_pages: int) -> list[bytes]:
        """The keys of at least the first pages of a request's known tokens, as far as those fill pages."""
        keys, size = request.trail.keys, self._page_bytes
        if len(keys) < num_pages:
            tokens = self._key(request, len(keys) * self._page_len, num_pages * self._page_len)
            keys += [tokens[at : at + size] for at in range(0, len(tokens), size)]
        return keys if len(keys) == num_pages else keys[:num_pages]

    def _key(self, request: Request, start: int, end: int) -> bytes:
        return key_of(request.token_ids(start, end))

    # -- entering -----------------------------------------------------------------------------------------

    def place(self, request: Request, match: Match) -> None:
        """A request takes its slot with the pages of a match."""
        trail, num_pages = request.trail, len(match.page_ids)
        trail.node, trail.tail, trail.awaited = match.node, None, None
        trail.num_entered_pages = trail.num_shared_pages = num_pages
        trail.next_len = (num_pages + 1) * self._page_len if self.is_enabled else NEVER

    def enter(self, request: Request) -> None:
        """Takes in the pages of a request that its tokens in the pool fill, where they are not in the trie yet."""
        trail, num_full = request.trail, request.num_committed_tokens // self._page_len
        if num_full <= trail.num_entered_pages:
            return
        self._remove_tail(trail)
        node = self._place_of(request)
        if node is None:
            return
        keys = self.keys_of(request, num_full)
        for index in range(trail.num_entered_pages, num_full):
            child = node.children.get(keys[index])
            node = self._trie.insert(node, keys[index], request.page_ids[index]) if child is None else child
        trail.node, trail.num_entered_pages = node, num_full
        trail.next_len = (num_full + 1) * self._page_len

    def enter_tail(self, request: Request) -> None:
        """Takes in the page behind the full ones, as far as it is filled: its beginning can be copied."""
        trail = request.trail
        start, end = trail.num_entered_pages * self._page_len, request.num_committed_tokens
        if not self._min_copied <= end - start < self._page_len:
            return
        self._remove_tail(trail)
        node, key = self._place_of(request), self._key(request, start, end)
        if node is not None and node.closest(key)[1] < end - start:
            trail.tail = self._trie.insert(node, key, request.page_ids[trail.num_entered_pages])

    def leave(self, request: Request) -> None:
        """A request gives up its pages; what it computed stays in the trie."""
        if self.is_enabled:
            self.enter(request)
            self.enter_tail(request)
        trail = request.trail
        trail.node, trail.tail, trail.next_len = None, None, NEVER

    def forget(self, request: Request) -> None:
        """Takes out what a request computed itself, and all that hangs on it: its numbers may not be finite."""
        for page in request.page_ids[request.trail.num_shared_pages :]:
            node = self._trie.node(page)
            if node is not None:
                self._trie.remove(node)
        request.trail.next_len = NEVER

    def clear(self) -> None:
        """The pool has lost its content."""
        self._trie.clear()

    def check_integrity(self) -> None:
        self._trie.check_integrity()

    def _place_of(self, request: Request) -> Node | None:
        """The node behind which the request's next page belongs; None where that is not in the trie any more."""
        trail = request.trail
        if trail.next_len == NEVER:
            return None
        if trail.num_entered_pages == 0:
            trail.node = self._trie.grow(self._root_key(request))
        if trail.node is None or trail.node.is_dead:
            trail.next_len = NEVER
            return None
        return trail.node

    def _remove_tail(self, trail: Trail) -> None:
        tail, trail.tail = trail.tail, None
        if tail is not None and not tail.is_dead:
            self._trie.remove(tail)
