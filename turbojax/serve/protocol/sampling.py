"""How to generate: the fields that chats and completions share, OpenAI's and LMDeploy's."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from turbojax.serve import bounds
from turbojax.serve.protocol.base import Strict, because

Penalty = Annotated[float, Field(ge=-2, le=2)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Word = Annotated[str, Field(min_length=1, max_length=bounds.MAX_STOP_WORD_LEN)]
NumTokens = Annotated[int, Field(ge=1, lt=2**31)]


class StreamOptions(Strict):
    """Of a streamed answer: `include_usage` adds a last chunk that has the usage and no choices."""

    include_usage: bool | None = None
    include_obfuscation: Annotated[Literal[False] | None, because("chunks are not padded: leave it out")] = None


class TextFormat(Strict):
    type: Literal["text"]


class JsonObjectFormat(Strict):
    type: Literal["json_object"]


class JsonSchema(Strict):
    """A schema that the answer follows in any case, `strict` or not; `name` is a label."""

    name: Annotated[str, Field(pattern=rf"^[a-zA-Z0-9_-]{{1,{bounds.MAX_NAME_LEN}}}$")]
    # Not a field of its own name, which would hide a method of pydantic's.
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    strict: bool | None = None
    description: Annotated[None, because("the model is not shown it: say it in a message")] = None


class JsonSchemaFormat(Strict):
    type: Literal["json_schema"]
    json_schema: JsonSchema


class RegexFormat(Strict):
    """LMDeploy's: the whole answer matches a pattern."""

    type: Literal["regex_schema"]
    regex_schema: Annotated[str, Field(min_length=1, max_length=bounds.MAX_PATTERN_LEN)]


class ChoiceFormat(Strict):
    """The answer is one of these texts."""

    type: Literal["choice"]
    choice: Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1, max_length=1024)]


class GrammarFormat(Strict):
    """The answer follows a grammar in Lark's form."""

    type: Literal["grammar"]
    grammar: Annotated[str, Field(min_length=1, max_length=bounds.MAX_PATTERN_LEN)]


ResponseFormat = Annotated[
    TextFormat | JsonObjectFormat | JsonSchemaFormat | RegexFormat | ChoiceFormat | GrammarFormat,
    Field(discriminator="type"),
]


class Sampling(Strict):
    """The model's name and how to generate. null is as if a field were left out."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=bounds.MAX_SAMPLES)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: (
        Annotated[
            dict[Annotated[str, Field(pattern=r"^[0-9]{1,9}$")], Annotated[float, Field(ge=-100, le=100)]],
            Field(max_length=bounds.MAX_LOGIT_BIAS),
        ]
        | None
    ) = None
    stop: Word | Annotated[list[Word], Field(max_length=bounds.MAX_STOP_WORDS)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    response_format: ResponseFormat | None = None
    user: Annotated[str, Field(max_length=512)] | None = None

    # Beyond OpenAI's; most are LMDeploy's. See GenerationConfig for what they mean.
    top_k: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    min_new_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=bounds.MAX_STOP_WORDS)] | None = None
    bad_words: Annotated[list[Word], Field(max_length=bounds.MAX_STOP_WORDS)] | None = None
    bad_token_ids: Annotated[list[TokenId], Field(max_length=bounds.MAX_LOGIT_BIAS)] | None = None
    include_stop_str_in_output: bool | None = None
    repetition_ngram_size: Annotated[int, Field(ge=0, le=1024)] | None = None
    repetition_ngram_threshold: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=512)] | None = None
    timeout_s: Annotated[float, Field(gt=0, le=1e9)] | None = None
    session_id: Annotated[
        Literal[-1] | None,
        because("there are no sessions: send the whole conversation, whose beginning is found in the prefix cache"),
    ] = None

    @property
    def num_choices(self) -> int:
        """For each prompt."""
        return self.n or 1
