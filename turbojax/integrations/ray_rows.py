"""Rows in the column conventions of `ray.data.llm`: their prompts and configs, and answers as columns. Knows no Ray."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from turbojax.cli.options import generation_config
from turbojax.configs import GenerationConfig
from turbojax.engine.response import LogprobOf, Response
from turbojax.errors import ConfigError, RowError, TurbojaxError
from turbojax.prompts import Prompt

# The first that a row has counts, so rows keep what their prompt was made from.
PROMPT_COLUMNS = ("tokenized_prompt", "messages", "prompt")
PARAMS_COLUMN = "sampling_params"
ERROR_COLUMN = "__inference_error__"
# vLLM's names, which rows of ray.data.llm have; our own are accepted beside them.
OUR_NAMES = {
    "max_tokens": "max_new_tokens", "min_tokens": "min_new_tokens", "seed": "random_seed", "stop": "stop_words",
    "structured_outputs": "response_format",
}  # fmt: skip
# What a row of text and token counts has no place for.
NOT_OF_ROWS = ("output_logits", "output_last_hidden_state", "logits_processor_params")
LOGPROBS = ("logprobs", "prompt_logprobs")
KEYS = frozenset(field.name for field in dataclasses.fields(GenerationConfig)) - set(NOT_OF_ROWS) | OUR_NAMES.keys()
OUR_FORMATS = {"json": "json_schema", "regex": "regex_schema", "choice": "choice", "grammar": "grammar"}


@dataclass(frozen=True)
class RowJob:
    """What a row asks for; messages are chat, and a text is taken as it is."""

    prompt: Prompt
    config: GenerationConfig


def check_base(config: GenerationConfig) -> GenerationConfig:
    """The config that all rows start from.

    Raises:
        ConfigError: it asks for several answers a row, or for arrays.
    """
    for field in ("output_logits", "output_last_hidden_state"):
        if getattr(config, field) is not None:
            raise ConfigError("GenerationConfig", field, getattr(config, field), "None in a dataset of texts")
    if config.n != 1:
        raise ConfigError("GenerationConfig", "n", config.n, "1: a row has one answer; repeat rows for several")
    return config


def job_of(row: Mapping[str, Any], base: GenerationConfig) -> RowJob:
    """What a row asks for, checked as far as that is possible without the model.

    Args:
        row: plain Python values by column; those of other columns are not looked at.
        base: what the row's sampling_params leave open.

    Raises:
        RowError: it has no prompt, or a column holds what it cannot; names the column.
    """
    return RowJob(prompt_of(row), config_of(row.get(PARAMS_COLUMN), base))


def prompt_of(row: Mapping[str, Any]) -> Prompt:
    """See `job_of`."""
    column = next((name for name in PROMPT_COLUMNS if row.get(name) is not None), None)
    if column is None:
        raise RowError(f"no prompt: one of {', '.join(PROMPT_COLUMNS)} is expected, of columns {', '.join(row)}")
    value = without_nulls(row[column])
    if column == "prompt":
        holds, accepted = isinstance(value, str), "a text"
    elif column == "messages":
        holds = isinstance(value, list) and bool(value) and all(isinstance(m, dict) and "role" in m for m in value)
        accepted = 'a list of objects with "role" and "content"'
    else:
        holds = isinstance(value, list) and all(isinstance(t, int) and not isinstance(t, bool) for t in value)
        accepted = "a list of token ids"
    if not holds:
        raise RowError(f"{column} is {shortened(row[column])}; accepted: {accepted}")
    return value


def config_of(params: Any, base: GenerationConfig) -> GenerationConfig:
    """The config of a row's sampling_params: `base` with what they name. Any sampling field turns sampling on.

    Nulls count as not given: they are what a column of structs has where one row names more fields than another.

    Raises:
        RowError: not an object, an unknown key, or a value that is out of range.
    """
    if params is None:
        return base
    if not isinstance(params, Mapping):
        raise RowError(f"{PARAMS_COLUMN} is {shortened(params)}; accepted: an object")
    given = without_nulls(params)
    if unknown := sorted(given.keys() - KEYS):
        raise RowError(f"{PARAMS_COLUMN} has {', '.join(unknown)}; accepted: {', '.join(sorted(KEYS))}")
    for theirs, ours in OUR_NAMES.items():
        if theirs in given and ours in given:
            raise RowError(f"{PARAMS_COLUMN} has both {theirs} and {ours}, which are the same")
    fields = {OUR_NAMES.get(name, name): ours_of(name, value) for name, value in given.items()}
    for name in LOGPROBS:
        if name in fields and getattr(base, name) is None:
            raise RowError(f"{PARAMS_COLUMN}.{name}: rows have it where the job's own gen_config has: columns are one")
    try:
        return check_base(generation_config(base, **fields))
    except TurbojaxError as error:
        raise RowError(f"{PARAMS_COLUMN}: {error}") from error


def ours_of(name: str, value: Any) -> Any:
    """What GenerationConfig takes for a value that vLLM writes in another way."""
    if name == "stop" and isinstance(value, str):
        return [value]
    if name == "top_k" and value == -1:
        return 0  # both turn it off
    if name == "structured_outputs":
        found = [kind for kind in OUR_FORMATS if isinstance(value, dict) and kind in value]
        if len(found) != 1 or len(value) != 1:
            raise RowError(f"structured_outputs is {shortened(value)}; accepted: one of {', '.join(OUR_FORMATS)}")
        kind = OUR_FORMATS[found[0]]
        return {"type": kind, kind: value[found[0]]}
    return value


def without_nulls(value: Any) -> Any:
    """A value without the fields that hold nothing, at any depth."""
    if isinstance(value, Mapping):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list | tuple) else value


def shortened(value: Any) -> str:
    """For errors."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def answer_columns(
    answers: Sequence[Response | RowError], base: GenerationConfig, *, with_errors: bool
) -> dict[str, list[Any]]:
    """The columns that a batch of rows gets; a row with an error has an empty answer of no tokens.

    Args:
        answers: a row each.
        base: of the job: whether there are columns of log-probabilities.
        with_errors: a column says what was wrong with each row; empty where nothing was.
    """
    empty = Response("")
    found = [empty if isinstance(answer, RowError) else answer for answer in answers]
    columns: dict[str, list[Any]] = {
        "generated_text": [answer.text for answer in found],
        "generated_tokens": [[int(token) for token in answer.token_ids] for answer in found],
        "num_input_tokens": [answer.num_input_tokens for answer in found],
        "num_generated_tokens": [answer.num_generated_tokens for answer in found],
        "finish_reason": [answer.finish_reason or "error" for answer in found],
    }
    for name in LOGPROBS:
        if getattr(base, name) is not None:
            columns[name] = [[tables_of(table) for table in getattr(answer, name) or ()] for answer in found]
    if with_errors:
        columns[ERROR_COLUMN] = [str(answer) if isinstance(answer, RowError) else "" for answer in answers]
    return columns


def tables_of(table: LogprobOf | None) -> list[dict[str, Any]]:
    """Log-probabilities at one place; none for the first token of a prompt."""
    return [{"token_id": int(token), "logprob": float(logprob)} for token, logprob in (table or {}).items()]
