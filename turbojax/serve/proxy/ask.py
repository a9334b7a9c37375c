"""What a request asks of the router: read from its body, which is passed on as it came."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from turbojax.engine.affinity import BLOCK_BYTES, MAX_BLOCKS
from turbojax.serve.openai_errors import ApiError
from turbojax.serve.proxy.load import PROMPT_TOKENS_PER_UNIT

BYTES_PER_TOKEN = 4.0
# Before any answer was counted.
FIRST_MEAN_OUTPUT = 256.0
_WEIGHT_OF_NEW = 0.05
MAX_MODEL_NAMES, MAX_NAME_LEN = 1000, 256
MAX_SAMPLES = 1024  # what asks for more will be refused, and must not weigh more until then


class OutputLengths:
    """How many tokens answers of each model have had, as a mean that fades."""

    def __init__(self) -> None:
        self._means: dict[str | None, float] = {}

    def mean(self, model: str | None) -> float:
        return self._means.get(model, FIRST_MEAN_OUTPUT)

    def count(self, model: str | None, num_tokens: float) -> None:
        """An answer had this many."""
        if model in self._means or len(self._means) < MAX_MODEL_NAMES:
            self._means[model] = self.mean(model) + _WEIGHT_OF_NEW * (num_tokens - self.mean(model))


@dataclass(frozen=True)
class Ask:
    """A request as the router sees it.

    Attributes:
        model: None where the body names none; then there must be one model only.
        prompt_work: what its prompt should cost, in generated tokens.
        output_work: how many tokens it should generate, over all its samples.
        num_samples: answers that it wants, so that `output_work` over it is one answer's.
        fields: the body.
    """

    model: str | None
    prompt_work: float = 0.0
    output_work: float = 0.0
    num_samples: int = 1
    fields: Mapping[str, Any] = field(default_factory=dict, repr=False)

    @property
    def work(self) -> float:
        return self.prompt_work + self.output_work

    @property
    def prefix_salt(self) -> str:
        """What keeps equal prompts apart in a node's prefix cache. `user` does not: all share one system prompt."""
        return json.dumps([self.model, self.fields.get("cache_salt")])

    def prefix(self) -> bytes:
        """The beginning of the prompt, written so that a longer conversation begins with a shorter one."""
        parts, size = [], 0
        for part in _parts(self.fields):
            parts.append(part)
            size += len(part)
            if size >= MAX_BLOCKS * BLOCK_BYTES:
                break
        return b"".join(parts)


def _parts(fields: Mapping[str, Any]) -> Iterator[bytes]:
    messages, prompt = fields.get("messages"), fields.get("prompt")
    if isinstance(messages, list):
        if fields.get("tools"):
            yield json.dumps(fields["tools"]).encode()  # templates put them before the messages
        for message in messages:
            yield json.dumps(message).encode()
    elif isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        yield json.dumps(prompt[0]).encode()
    elif prompt:
        yield json.dumps(prompt).encode()


def read_ask(body: bytes, outputs: OutputLengths, *, generates: bool) -> Ask:
    """What the router needs of a body; everything else is the node's to judge.

    Args:
        body: of the request.
        outputs: how long answers have been.
        generates: the route generates tokens.

    Raises:
        ApiError: 400, the body is no JSON object, or its model no name.
    """
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, "The body is not valid JSON.", code="invalid_json") from error
    if not isinstance(fields, dict):
        raise ApiError(400, "The body must be a JSON object.")
    model = fields.get("model")
    if not (model is None or (isinstance(model, str) and 0 < len(model) <= MAX_NAME_LEN)):
        raise ApiError(400, "model must be the name of a model, as /v1/models lists them.", param="model")
    prompt_work = len(body) / BYTES_PER_TOKEN / PROMPT_TOKENS_PER_UNIT
    if not generates:
        return Ask(model, prompt_work, fields=fields)
    num_samples = min(MAX_SAMPLES, _num_prompts(fields.get("prompt")) * (_count(fields.get("n")) or 1))
    limit = _count(fields.get("max_completion_tokens")) or _count(fields.get("max_tokens"))
    mean = outputs.mean(model)
    each = mean if limit is None else min(mean, limit)
    return Ask(model, prompt_work, each * num_samples, num_samples, fields)


def _count(value: Any) -> int | None:
    """A number that a node may accept; what it will refuse must not upset the router."""
    is_count = isinstance(value, int) and not isinstance(value, bool) and 0 < value < 1 << 31
    return value if is_count else None


def _num_prompts(prompt: Any) -> int:
    is_several = isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], str | list)
    return len(prompt) if is_several else 1
