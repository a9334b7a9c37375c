"""The options that several subcommands share, and the configs they become."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from turbojax.configs import ClusterConfig, EngineConfig, GenerationConfig

# Any of these asks for sampling; without them the answer is greedy.
SAMPLING_FIELDS = frozenset({"temperature", "top_p", "top_k", "min_p", "random_seed"})

_GENERATION, _ENGINE, _PROCESSES = "Generation", "Engine", "Several processes"

# Defaults stand in the two config classes alone; None here means "as there".
Model = Annotated[
    str | None,
    typer.Option(
        "--model", "-m", help="A folder, a .gguf file or a Hugging Face repo id; default: SmolLM2-135M-Instruct."
    ),
]
MaxNewTokens = Annotated[int | None, typer.Option(rich_help_panel=_GENERATION, help="Most tokens to generate.")]
Temperature = Annotated[
    float | None, typer.Option(rich_help_panel=_GENERATION, help="Divides the logits; 0 is greedy.")
]
TopP = Annotated[
    float | None, typer.Option(rich_help_panel=_GENERATION, help="Keep the likeliest tokens up to this probability.")
]
TopK = Annotated[
    int | None, typer.Option(rich_help_panel=_GENERATION, help="Keep this many of the likeliest tokens; 0 is off.")
]
MinP = Annotated[
    float | None,
    typer.Option(rich_help_panel=_GENERATION, help="Keep tokens at least this probable relative to the likeliest."),
]
RepetitionPenalty = Annotated[
    float | None,
    typer.Option(rich_help_panel=_GENERATION, help="Above 1, tokens of prompt and answer become less likely."),
]
PresencePenalty = Annotated[
    float | None, typer.Option(rich_help_panel=_GENERATION, help="Taken off the logits of tokens that were generated.")
]
FrequencyPenalty = Annotated[
    float | None, typer.Option(rich_help_panel=_GENERATION, help="The same, for each time that they were.")
]
Stop = Annotated[
    list[str] | None,
    typer.Option("--stop", rich_help_panel=_GENERATION, help="A text that ends the answer; repeatable."),
]
BadWord = Annotated[
    list[str] | None,
    typer.Option("--bad-word", rich_help_panel=_GENERATION, help="A text that the answer never has; repeatable."),
]
JsonSchema = Annotated[
    Path | None,
    typer.Option(
        "--json-schema",
        exists=True,
        dir_okay=False,
        rich_help_panel=_GENERATION,
        help="A schema that the answer follows.",
    ),
]
Regex = Annotated[
    str | None, typer.Option("--regex", rich_help_panel=_GENERATION, help="A pattern that the whole answer matches.")
]
Choice = Annotated[
    list[str] | None,
    typer.Option("--choice", rich_help_panel=_GENERATION, help="A text that the answer may be; repeatable."),
]
Seed = Annotated[int | None, typer.Option(rich_help_panel=_GENERATION, help="Makes sampling repeatable.")]
Dtype = Annotated[
    str | None, typer.Option(rich_help_panel=_ENGINE, help="auto, bfloat16, float16 or float32.", show_default=False)
]
ModelFormat = Annotated[
    str | None,
    typer.Option(rich_help_panel=_ENGINE, help="hf, awq, gptq, ...: what the checkpoint must be.", show_default=False),
]
SessionLen = Annotated[
    int | None, typer.Option(rich_help_panel=_ENGINE, help="Most tokens of a sequence, the prompt included.")
]
MaxBatchSize = Annotated[int | None, typer.Option(rich_help_panel=_ENGINE, help="Sequences that run at once.")]
QuantPolicy = Annotated[
    int | None, typer.Option(rich_help_panel=_ENGINE, help="Bits of the KV cache: 0 (as the activations), 8 or 4.")
]


def _share_or_pages(text: str) -> float | int:
    return int(text) if text.isdecimal() else float(text)


CacheMaxEntryCount = Annotated[
    Any,
    typer.Option(
        parser=_share_or_pages,
        metavar="SHARE|PAGES",
        rich_help_panel=_ENGINE,
        help="KV cache: a share of the free memory (0.5) or a number of pages (512).",
    ),
]


Tp = Annotated[int | None, typer.Option("--tp", rich_help_panel=_ENGINE, help="Devices the model is cut between.")]
Dp = Annotated[
    int | None, typer.Option("--dp", rich_help_panel=_ENGINE, help="Engines side by side, of tp devices each.")
]


@dataclass(frozen=True)
class Processes:
    """Of one engine; what is left open is detected where any of these is given."""

    coordinator_address: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            rich_help_panel=_PROCESSES,
            help="The first process, where Slurm, Open MPI or Kubernetes do not say; the next port is used too.",
        ),
    ] = None
    num_processes: Annotated[
        int | None,
        typer.Option(
            rich_help_panel=_PROCESSES,
            help="Processes that run the same command and one engine together. They share TURBOJAX_CLUSTER_TOKEN.",
        ),
    ] = None
    process_id: Annotated[
        int | None, typer.Option(rich_help_panel=_PROCESSES, help="Which of them this one is, from 0, if nobody says.")
    ] = None

    def cluster(self) -> ClusterConfig | None:
        """None where the process is alone."""
        return None if self == Processes() else ClusterConfig(**vars(self))


def engine_config(**fields: Any) -> EngineConfig:
    """The engine's config; fields that are None keep their default."""
    return EngineConfig(**{name: value for name, value in fields.items() if value is not None})


def response_format(
    json_schema: Path | None = None, regex: str | None = None, choice: list[str] | None = None
) -> dict[str, Any] | None:
    """What the answer must be, in GenerationConfig's form.

    Raises:
        typer.BadParameter: more than one of these.
    """
    forms: dict[str, Any] = {
        "json_schema": None if json_schema is None else json_schema.read_text(),
        "regex_schema": regex,
        "choice": choice,
    }
    given = {kind: value for kind, value in forms.items() if value}
    if len(given) > 1:
        raise typer.BadParameter("give one of --json-schema, --regex and --choice")
    return next(({"type": kind, kind: value} for kind, value in given.items()), None)


@dataclass(frozen=True)
class Generation:
    """How an answer is generated. Any option of sampling turns it on."""

    max_new_tokens: MaxNewTokens = None
    temperature: Temperature = None
    top_p: TopP = None
    top_k: TopK = None
    min_p: MinP = None
    seed: Seed = None
    repetition_penalty: RepetitionPenalty = None
    presence_penalty: PresencePenalty = None
    frequency_penalty: FrequencyPenalty = None
    stop: Stop = None
    bad_word: BadWord = None
    json_schema: JsonSchema = None
    regex: Regex = None
    choice: Choice = None

    def config(self) -> GenerationConfig:
        """
        Raises:
            ConfigError: a value is out of range.
            typer.BadParameter: more than one form of the answer.
        """
        return generation_config(
            max_new_tokens=self.max_new_tokens, temperature=self.temperature, top_p=self.top_p, top_k=self.top_k,
            min_p=self.min_p, random_seed=self.seed, repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty, frequency_penalty=self.frequency_penalty, stop_words=self.stop,
            bad_words=self.bad_word, response_format=response_format(self.json_schema, self.regex, self.choice),
        )  # fmt: skip


@dataclass(frozen=True)
class Engine:
    """What an engine computes with, and on how much."""

    dtype: Dtype = None
    model_format: ModelFormat = None
    session_len: SessionLen = None
    quant_policy: QuantPolicy = None
    cache_max_entry_count: CacheMaxEntryCount = None

    def config(self, **more: Any) -> EngineConfig:
        """With other fields; those that are None keep their default.

        Raises:
            ConfigError: a value is out of range.
        """
        return engine_config(**dataclasses.asdict(self), **more)


def generation_config(base: GenerationConfig | None = None, **fields: Any) -> GenerationConfig:
    """`base` with other fields; those that are None keep their value. Any sampling field turns sampling on.

    Raises:
        ConfigError: a value is out of range.
    """
    given = {name: value for name, value in fields.items() if value is not None and value != []}
    if SAMPLING_FIELDS & given.keys():
        given.setdefault("do_sample", True)
    return dataclasses.replace(base or GenerationConfig(), **given)
