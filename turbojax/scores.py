"""How likely a model finds texts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from turbojax.engine.response import Response
from turbojax.errors import InvalidPromptError, RequestError
from turbojax.generation import GenerationConfig
from turbojax.prompts import as_list, is_int

if TYPE_CHECKING:
    from turbojax.api import Pipeline


def mean_losses(pipe: Pipeline, input_ids: Sequence[int] | Sequence[Sequence[int]]) -> list[float]:
    """See `Pipeline.get_ppl`."""
    sequences: Sequence[Any] = as_list(input_ids)
    for index, ids in enumerate(sequences):
        if len(ids) < 2 or not is_int(ids[0]):
            raise InvalidPromptError(f"sequence {index}: two token ids at least are expected: the first has no loss")
    responses = pipe(sequences, GenerationConfig(max_new_tokens=1, prompt_logprobs=0))
    assert isinstance(responses, list)
    return [mean_loss(response, sequences[response.index]) for response in responses]


def mean_loss(response: Response, token_ids: Sequence[int]) -> float:
    """Of the prompt of a response, which are these token ids; in nats."""
    if response.prompt_logprobs is None:
        raise RequestError(f"sequence {response.index}: {response.error}")
    pairs = zip(token_ids[1:], response.prompt_logprobs[1:], strict=True)
    losses = [-found[int(token)] for token, found in pairs if found is not None]
    return sum(losses) / len(losses)
