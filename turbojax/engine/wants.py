"""What a request wants beside its tokens, and rows of it: cut, and put together again."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from turbojax.engine.plan import RowOutputs
from turbojax.generation import Extent


@dataclass(frozen=True)
class Wants:
    """What a request wants of its rows; None is nothing.

    Attributes:
        num_logprobs, num_prompt_logprobs: log-probabilities of each token, with those of so many of the likeliest ones.
        logits, hidden: the rows' logits and last hidden states.
    """

    num_logprobs: int | None = None
    num_prompt_logprobs: int | None = None
    logits: Extent | None = None
    hidden: Extent | None = None

    @property
    def of_tokens(self) -> bool:
        """Something of generated tokens."""
        return self.num_logprobs is not None or self.logits is not None or self.hidden is not None

    @property
    def of_prompt(self) -> bool:
        """Something of the prompt's rows."""
        return self.num_prompt_logprobs is not None or self.logits == "all" or self.hidden == "all"


NOTHING = Wants()


def cut(rows: RowOutputs, start: int, end: int) -> RowOutputs:
    """Rows start .. end."""
    return RowOutputs(
        None if rows.logprobs is None else rows.logprobs[start:end],
        None if rows.logits is None else rows.logits[start:end],
        None if rows.hidden is None else rows.hidden[start:end],
    )


def stacked(parts: Iterable[np.ndarray | None]) -> np.ndarray | None:
    """Rows of several steps, one behind the other; None if there are none."""
    found: Sequence[np.ndarray] = [part for part in parts if part is not None]
    return np.concatenate(found) if found else None
