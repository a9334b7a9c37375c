"""What ends a text on the host: stop words wherever they appear, and the same run of tokens again and again."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass

from turbojax.generation import NGRAM_WINDOW_TOKENS


@dataclass(frozen=True)
class StopRules:
    """When a request's text ends, beside the stop tokens that the device knows.

    Attributes:
        words: texts that end it.
        token_ids: the device's stop tokens, which are not text.
        min_new_tokens: nothing on the host ends it before this many tokens.
        ngram_size, ngram_threshold: it ends once its last `size` tokens stand in it `threshold` times; 0 is off.
        shows_stop: the stop word, or the stop token's text, stays at the end of the text.
    """

    words: tuple[str, ...] = ()
    token_ids: frozenset[int] = frozenset()
    min_new_tokens: int = 0
    ngram_size: int = 0
    ngram_threshold: int = 0
    shows_stop: bool = False

    @property
    def reads_tokens(self) -> bool:
        """Each token must be looked at when it comes; otherwise the text can wait for the end."""
        return bool(self.words or self.ngram_size)


class NgramStop:
    """Counts the runs of `size` tokens in the newest tokens: O(size) a token."""

    def __init__(self, size: int, threshold: int) -> None:
        self._threshold = threshold
        self._recent: deque[int] = deque(maxlen=size)
        self._runs: deque[tuple[int, ...]] = deque()
        self._max_runs = NGRAM_WINDOW_TOKENS - size + 1
        self._counts: Counter[tuple[int, ...]] = Counter()

    def push(self, token: int) -> bool:
        """Whether the run that this token ends has now been seen often enough."""
        self._recent.append(token)
        if len(self._recent) < (self._recent.maxlen or 0):
            return False
        run = tuple(self._recent)
        self._runs.append(run)
        self._counts[run] += 1
        if len(self._runs) > self._max_runs:
            oldest = self._runs.popleft()
            self._counts[oldest] -= 1
            if not self._counts[oldest]:
                del self._counts[oldest]
        return self._counts[run] >= self._threshold


class StopWords:
    """Finds the first stop word in a growing text, and holds back what may become one."""

    def __init__(self, words: Sequence[str]) -> None:
        self._words = tuple(words)
        self._held = ""
        self.found: str | None = None

    def push(self, text: str) -> str:
        """The text that is safe to show; once a stop word is found, what stood before it, and nothing after."""
        if self.found is not None:
            return ""
        text = self._held + text
        hits = [(at, word) for word in self._words if (at := text.find(word)) >= 0]
        if hits:
            at, self.found = min(hits)
            self._held = ""
            return text[:at]
        num_held = max((self._overlap(text, word) for word in self._words), default=0)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held]

    def flush(self) -> str:
        """The held-back text: no stop word came of it."""
        held, self._held = self._held, ""
        return held

    @staticmethod
    def _overlap(text: str, word: str) -> int:
        """Length of the longest end of the text that begins the word."""
        longest = min(len(text), len(word) - 1)
        return next((n for n in range(longest, 0, -1) if text.endswith(word[:n])), 0)
