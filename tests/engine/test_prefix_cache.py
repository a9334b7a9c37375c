"""What requests find of each other's pages: against a model without pages, and who goes first when room is needed."""

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.engine.harness import PAGE_LEN
from turbojax.engine.block_pool import BlockPool
from turbojax.engine.plan import SamplingParams
from turbojax.engine.prefix_cache import PrefixCache
from turbojax.engine.request import Request

NUM_PAGES = 13
# Few tokens, so that sequences begin alike in every way.
sequences = st.lists(st.integers(0, 2), min_size=1, max_size=14)


def common_len(a, b):
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


class Cache(RuleBasedStateMachine):
    """Sequences take pages from the pool and give them back, beside a list of what each page in use or idle holds.

    What a sequence finds must be right by that list, and as much as the pages of the trie allow: the longest chain of
    full pages, and behind it the longest beginning of any page that a chain leads to.
    """

    @initialize()
    def start(self):
        self.pool = BlockPool(NUM_PAGES, PAGE_LEN)
        self.cache = PrefixCache(self.pool, regime_of=lambda length: length > 10)
        self.content = {}  # page -> (salt, regime, all tokens up to its last one)
        self.holders = []

    @rule(tokens=sequences, salt=st.sampled_from([None, "a"]))
    def arrive(self, tokens, salt):
        r = Request(0, np.asarray(tokens, np.int32), SamplingParams(), (), 100, cache_salt=salt)
        name = (salt, len(tokens) > 10)
        match = self.cache.find(r)
        self.check_match(name, tokens, match)
        self.pool.share(match.page_ids)
        new = self.pool.allocate(self.pool.pages_for(len(tokens)) - len(match.page_ids))
        if new is None:
            self.pool.release(reversed(match.page_ids))
            return
        r.page_ids = match.page_ids + new
        r.num_committed_tokens = match.num_tokens
        for page in new:
            self.content.pop(page, None)
        self.cache.place(r, match)
        self.holders.append((name, r))

    def check_match(self, name, tokens, match):
        known = tokens[:-1]
        for i, page in enumerate(match.page_ids):
            assert self.content[page] == (name, tokens[: (i + 1) * PAGE_LEN])
        num_full = len(match.page_ids) * PAGE_LEN
        assert match.num_tokens == num_full + match.num_copied <= len(known)
        if match.num_copied:
            found_name, found = self.content[match.source_id]
            assert (found_name, found[: match.num_tokens]) == (name, tokens[: match.num_tokens])
        # As much as can be: by brute force over the pages that the pool keeps.
        kept = [self.content[page][1] for page in self.pool.kept_pages() if self.content[page][0] == name]
        full = {tuple(found) for found in kept if len(found) % PAGE_LEN == 0}
        longest = 0
        while longest + PAGE_LEN <= len(known) and tuple(tokens[: longest + PAGE_LEN]) in full:
            longest += PAGE_LEN
        assert num_full == longest
        behind = [found for found in kept if longest < len(found) <= longest + PAGE_LEN]
        copied = max([common_len(found, known) - longest for found in behind], default=0)
        assert match.num_copied == max(0, copied)

    @precondition(lambda self: self.holders)
    @rule(pick=st.integers(0, 99), num_tokens=st.integers(1, 6), tail=st.booleans())
    def compute(self, pick, num_tokens, tail):
        name, r = self.holders[pick % len(self.holders)]
        end = min(r.num_committed_tokens + num_tokens, r.num_tokens)
        r.num_committed_tokens = end
        self.cache.enter(r)
        if tail:
            self.cache.enter_tail(r)
        self.record(name, r)

    def record(self, name, r):
        """What its own pages hold now; of one in the trie that is not full, what the trie says it holds."""
        tokens = r.prompt_ids.tolist()
        for i in range(r.trail.num_shared_pages, len(r.page_ids)):
            end = min((i + 1) * PAGE_LEN, r.num_committed_tokens)
            tail = r.trail.tail
            if tail is not None and tail.page_id == r.page_ids[i]:
                end = i * PAGE_LEN + len(tail.key) // 4
            if end > i * PAGE_LEN:
                self.content[r.page_ids[i]] = (name, tokens[:end])

    @precondition(lambda self: self.holders)
    @rule(pick=st.integers(0, 99), is_dirty=st.booleans())
    def end(self, pick, is_dirty):
        name, r = self.holders.pop(pick % len(self.holders))
        own = r.page_ids[r.trail.num_shared_pages :]
        if is_dirty:
            self.cache.forget(r)
            self.cache.enter(r)  # of a step that was in flight meanwhile
            self.cache.enter_tail(r)
            assert self.pool.kept_pages().isdisjoint(own)
        else:
            self.record_all(name, r)
            self.cache.leave(r)
        self.pool.release(reversed(r.page_ids))

    def record_all(self, name, r):
        tokens = r.prompt_ids.tolist()
        for i in range(r.trail.num_shared_pages, len(r.page_ids)):
            if r.num_committed_tokens > i * PAGE_LEN:
                self.content[r.page_ids[i]] = (name, tokens[: min((i + 1) * PAGE_LEN, r.num_committed_tokens)])

    @rule()
    def lose_everything(self):
        self.cache.clear()
        assert self.cache.num_pages == 0
        for _, r in self.holders:
            self.pool.release(reversed(r.page_ids))
        self.holders.clear()
        assert self.pool.num_free_pages() == NUM_PAGES - 1

    @invariant()
    def holds(self):
        self.pool.check_integrity()
        self.cache.check_integrity()
        held = {page for _, r in self.holders for page in r.page_ids}
        num_held = NUM_PAGES - 1 - self.pool.num_available_pages()
        assert num_held == len(held)


TestCache = Cache.TestCase
TestCache.settings = settings(max_examples=120, stateful_step_count=30, deadline=None)
