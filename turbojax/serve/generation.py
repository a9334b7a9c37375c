"""From a request's fields to a GenerationConfig, and its errors back to the request's own names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from turbojax.errors import ConfigError, EmptyPromptError, InvalidPromptError, PromptTooLongError, RequestError
from turbojax.generation import SEED_LIMIT, GenerationConfig
from turbojax.serve import bounds
from turbojax.serve.openai_errors import ApiError, to_api_error
from turbojax.serve.protocol.sampling import JsonSchemaFormat, ResponseFormat, Sampling
from turbojax.serve.service import Service

# What a sampled request has that neither it nor the model's generation_config.json gives: OpenAI's.
OPENAI_DEFAULTS = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
# Fields that mean the same under the same name.
SAME = (
    "n", "presence_penalty", "frequency_penalty", "logit_bias", "ignore_eos", "skip_special_tokens", "min_new_tokens",
    "stop_token_ids", "bad_words", "bad_token_ids", "include_stop_str_in_output", "repetition_ngram_size",
    "repetition_ngram_threshold", "priority", "cache_salt", "timeout_s",
)  # fmt: skip
REQUEST_NAMES = {"random_seed": "seed", "stop_words": "stop", "max_new_tokens": "max_tokens"}


def generation_config(service: Service, body: Sampling, **chosen: Any) -> GenerationConfig:
    """How a request generates; `chosen` are the fields that each kind of request has of its own.

    Raises:
        ConfigError: a field contradicts another, or is better than this server gives.
    """
    if body.priority is not None and body.priority < service.config.min_priority:
        accepted = f"an int of {service.config.min_priority} at least, the server's min_priority; lower goes first"
        raise ConfigError("GenerationConfig", "priority", body.priority, accepted)
    fields = {name: value for name in SAME if (value := getattr(body, name)) is not None}
    if body.seed is not None:
        fields["random_seed"] = body.seed % SEED_LIMIT  # the device's seeds have 32 bits, OpenAI's 64
    if body.stop is not None:
        fields["stop_words"] = (body.stop,) if isinstance(body.stop, str) else body.stop
    if body.response_format is not None:
        fields["response_format"] = as_engine_format(body.response_format)
    return GenerationConfig(**fields | sampling_fields(service, body) | chosen)


def check_stream_options(body: Sampling) -> None:
    """
    Raises:
        ApiError: options of a stream for an answer that is none.
    """
    if body.stream_options is not None and not body.stream:
        raise ApiError(400, "stream_options goes with stream", param="stream_options")


def sampling_fields(service: Service, body: Sampling) -> dict[str, Any]:
    """Temperature and its like. A request of temperature 0 is greedy and takes nothing from the model."""
    given = {name: value for name in OPENAI_DEFAULTS if (value := getattr(body, name)) is not None}
    values = OPENAI_DEFAULTS | dict(service.pipe.sampling_defaults) | given
    if values["temperature"] == 0:
        return {"do_sample": False, **given}
    return {"do_sample": True, **values}


def as_engine_format(form: ResponseFormat) -> dict[str, Any]:
    """A response format as the engine takes it.

    Raises:
        InvalidFieldError: a schema that would take too long to compile.
    """
    if isinstance(form, JsonSchemaFormat):
        bounds.check_schema("response_format.json_schema.schema", form.json_schema.schema_)
        return {"type": "json_schema", "json_schema": {"schema": form.json_schema.schema_}}
    return form.model_dump()


@contextmanager
def naming(prompt: str, names: Mapping[str, str] = REQUEST_NAMES) -> Iterator[None]:
    """Errors of the engine, under the names of a request's fields; `prompt` is the field that holds its prompt.

    Raises:
        ApiError: in place of a ConfigError or RequestError.
    """
    try:
        yield
    except (ConfigError, RequestError) as error:
        told = to_api_error(error)
        if isinstance(error, ConfigError):
            told.param = names.get(error.field, error.field)
            told.message = f"{told.param} is {error.value!r}; accepted: {error.accepted}"
        elif isinstance(error, EmptyPromptError | InvalidPromptError | PromptTooLongError):
            told.param = prompt
        raise told from error
