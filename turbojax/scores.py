"""How likely a model finds texts."""

from __future__ import annotations

from collections.abc import Sequence

from turbojax.engine.response import Response
from turbojax.errors import RequestError


def mean_loss(response: Response, token_ids: Sequence[int]) -> float:
    """Of the prompt of a response, which are these token ids; in nats."""
    if response.prompt_logprobs is None:
        raise RequestError(f"sequence {response.index}: {response.error}")
    pairs = zip(token_ids[1:], response.prompt_logprobs[1:], strict=True)
    losses = [-found[int(token)] for token, found in pairs if found is not None]
    return sum(losses) / len(losses)
