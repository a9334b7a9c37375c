"""turbojax as a model of EleutherAI's lm-evaluation-harness (`pip install turbojax[eval]`).

    python -m turbojax.integrations.lm_eval --model turbojax --model_args pretrained=MODEL,quant_policy=8 --tasks ...

or `lm_eval.simple_evaluate(model=TurbojaxLM(MODEL), tasks=[...])`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from turbojax.api import Pipeline, pipeline
from turbojax.configs import EngineConfig, GenerationConfig
from turbojax.engine.response import Response
from turbojax.errors import MissingExtraError, MissingTokenizerError, RequestError, TurbojaxError

if TYPE_CHECKING:
    from turbojax.tokenizer import Tokenizer

try:
    from lm_eval.api.model import LM
    from lm_eval.api.registry import register_model
except ImportError as error:
    raise MissingExtraError("lm_eval is not installed: pip install 'turbojax[eval]'") from error

Pair = tuple[list[int], list[int]]
"""Token ids of a context, and of the continuation that is scored behind it."""

# The harness's names of the most tokens to generate, the one that counts first.
LENGTH_NAMES = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
SAMPLING_NAMES = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "random_seed")


@register_model("turbojax")
class TurbojaxLM(LM):
    """Scores and generates on a pipeline, which batches by itself: all requests of a call go to it at once."""

    def __init__(
        self,
        pretrained: str | Path | Pipeline | None = None,
        *,
        max_gen_toks: int = 256,
        batch_size: int | str = 1,
        device: str | None = None,
        **engine: Any,
    ) -> None:
        """Opens a model.

        Args:
            pretrained: what `turbojax.pipeline` takes, or an open pipeline.
            max_gen_toks: most tokens to generate where a task does not say.
            batch_size: sequences that run at once; 1 (the harness's default) and "auto" leave that to the engine.
            device: None, or the platform that JAX runs on ("cpu", "gpu", "cuda").
            engine: fields of `EngineConfig`.

        Raises:
            TurbojaxError, CheckpointError: the model or a field cannot be used.
        """
        super().__init__()
        check_device(device)
        if isinstance(pretrained, Pipeline):
            self.pipe, self._name = pretrained, "turbojax"
            if engine:
                raise RequestError(f"{', '.join(engine)}: an open pipeline has an EngineConfig already")
        else:
            if batch_size not in (1, "1", "auto"):
                engine["max_batch_size"] = int(batch_size)
            self.pipe, self._name = pipeline(pretrained, EngineConfig(**engine)), str(pretrained)
        self.max_gen_toks = int(max_gen_toks)

    @property
    def tokenizer(self) -> Tokenizer:
        """Raises MissingTokenizerError where the model has none."""
        if self.pipe.tokenizer is None:
            raise MissingTokenizerError(f"{self._name}: has no tokenizer, and the harness speaks in texts")
        return self.pipe.tokenizer

    @property
    def max_length(self) -> int:
        """Most tokens that are scored at once: one more is generated behind them."""
        return self.pipe.session_len - 1

    @property
    def prefix_token_id(self) -> int:
        """What stands before a text that has nothing before it."""
        found = self.tokenizer.eos_id if self.tokenizer.bos_id is None else self.tokenizer.bos_id
        if found is None:
            raise MissingTokenizerError(f"{self._name}: its tokenizer has neither a start nor an end token")
        return found

    def encode(self, text: str) -> list[int]:
        """Token ids; the start token comes once, if the text (a chat template's) has it already."""
        tokenizer = self.tokenizer
        if tokenizer.bos_id is None:
            return tokenizer.encode(text)
        has_start = text.startswith(tokenizer.decode([tokenizer.bos_id], skip_special_tokens=False))
        return tokenizer.encode(text, add_special_tokens=not has_start)

    def encode_pair(self, context: str, continuation: str) -> Pair:
        """Both as the tokens of one text; spaces at the end of the context begin the continuation.

        Raises:
            RequestError: the continuation has no token of its own.
        """
        if not context:
            before, after = [self.prefix_token_id], self.tokenizer.encode(continuation, add_special_tokens=False)
            if after[:1] == before:  # the text begins with it by itself
                after = after[1:]
        else:
            stripped = context.rstrip() or context
            whole, before = self.encode(context + continuation), self.encode(stripped)
            after = whole[len(before) :]
        if not after:
            raise RequestError(f"the continuation {continuation!r} adds no token to its context")
        return before, after

    # -- what the harness calls ---------------------------------------------------------------------------

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        """Log-probability of each continuation behind its context, and whether greedy decoding would give it."""
        del disable_tqdm  # the engine is asked once
        found = self.score([self.encode_pair(*request.args) for request in requests])
        for request, answer in zip(requests, found, strict=True):
            self.cache_hook.add_partial("loglikelihood", request.args, answer)
        return found

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = True) -> list[float]:
        """Log-probability of each whole text; long ones in windows, each with as much context as fits."""
        del disable_tqdm
        texts = [self.tokenizer.encode(request.args[0], add_special_tokens=False) for request in requests]
        windows = [list(rolling_windows(ids, self.prefix_token_id, self.max_length)) for ids in texts]
        scores = iter(self.score([pair for of_text in windows for pair in of_text]))
        found = [sum(next(scores)[0] for _ in of_text) for of_text in windows]
        for request, answer in zip(requests, found, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, answer)
        return found

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = True) -> list[str]:
        """Texts up to a stop text, which is left out."""
        del disable_tqdm
        configs = [self.generation(dict(request.args[1])) for request in requests]
        prompts = []
        for request, config in zip(requests, configs, strict=True):
            assert config.max_new_tokens is not None
            room = self.pipe.session_len - min(config.max_new_tokens, self.pipe.session_len - 1)
            prompts.append((self.encode(request.args[0]) or [self.prefix_token_id])[-room:])
        texts = [response.text for response in self.run(prompts, configs)]
        for request, text in zip(requests, texts, strict=True):
            self.cache_hook.add_partial("generate_until", request.args, text)
        return texts

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """The text that the model's chat template makes of a conversation."""
        return self.tokenizer.render_chat(chat_history, add_generation_prompt=add_generation_prompt)

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """The model's own template, as the harness records it; it has no others by name."""
        if isinstance(chat_template, str):
            raise RequestError(f"chat_template is {chat_template!r}; accepted: True or False, for the model's only one")
        return self.tokenizer.chat_template if chat_template else None

    @property
    def tokenizer_name(self) -> str:
        """Of the model: the harness keys its cache by it."""
        return self._name.replace("/", "__")

    # -- how it is done -----------------------------------------------------------------------------------

    def run(self, prompts: list[list[int]], configs: Sequence[GenerationConfig]) -> list[Response]:
        """All prompts at once; the first error is raised."""
        if not prompts:
            return []
        found = self.pipe(prompts, list(configs))
        assert isinstance(found, list)
        for response in found:
            if response.error is not None:
                raise TurbojaxError(response.error)
        return found

    def score(self, pairs: Sequence[Pair]) -> list[tuple[float, bool]]:
        """Log-probability of each continuation, and whether its tokens are all the likeliest.

        Context that does not fit is cut off at its beginning.

        Raises:
            RequestError: a continuation leaves no room for a token before it.
        """
        for _, continuation in pairs:
            if len(continuation) >= self.max_length:
                raise RequestError(
                    f"a continuation has {len(continuation)} tokens; at most {self.max_length - 1} can be scored at "
                    f"once with session_len {self.pipe.session_len}"
                )
        prompts = [(context + continuation)[-self.max_length :] for context, continuation in pairs]
        config = GenerationConfig(max_new_tokens=1, prompt_logprobs=1)
        found = []
        for response, (_, continuation) in zip(self.run(prompts, [config] * len(prompts)), pairs, strict=True):
            assert response.prompt_logprobs is not None
            tables = [table or {} for table in response.prompt_logprobs[-len(continuation) :]]
            scored = list(zip(tables, continuation, strict=True))
            total = sum(table[token] for table, token in scored)
            found.append((total, all(max(table, key=table.__getitem__) == token for table, token in scored)))
        return found

    def generation(self, wanted: dict[str, Any]) -> GenerationConfig:
        """The config of a task's `generation_kwargs`.

        Raises:
            RequestError: it names something that GenerationConfig has not.
        """
        until = wanted.pop("until", None) or []
        lengths = [value for name in LENGTH_NAMES if (value := wanted.pop(name, None)) is not None]
        sampled = wanted.pop("do_sample", bool(wanted.get("temperature")))
        sampling = {name: value for name in SAMPLING_NAMES if (value := wanted.pop(name, None)) is not None}
        if wanted:
            accepted = ", ".join(("until", "do_sample", *LENGTH_NAMES, *SAMPLING_NAMES))
            raise RequestError(f"generation_kwargs has {', '.join(wanted)}; accepted: {accepted}")
        words = [until] if isinstance(until, str) else until
        return GenerationConfig(
            max_new_tokens=int(lengths[0]) if lengths else self.max_gen_toks,
            do_sample=bool(sampled),
            stop_words=tuple(word for word in words if word),
            **sampling,
        )


def rolling_windows(token_ids: Sequence[int], prefix: int, max_len: int) -> Iterator[Pair]:
    """Every token of a text once, each window with as much context as `max_len` tokens allow.

    Args:
        token_ids: of the text.
        prefix: stands before the first.
        max_len: of context and continuation together, from 2 on.
    """
    ids = list(token_ids)
    step = max_len - 1
    if ids:
        yield [prefix], ids[:step]
    for start in range(step, len(ids), step):
        end = min(start + step, len(ids))
        yield ids[max(0, end - max_len) : start], ids[start:end]


def check_device(device: str | None) -> None:
    """Raises RequestError where JAX runs on another platform than the one that was asked for."""
    import jax

    platform = jax.default_backend()
    if device is not None and device.split(":")[0] not in (platform, {"gpu": "cuda"}.get(platform, platform)):
        raise RequestError(f"device is {device!r}, and JAX runs on {platform}: set JAX_PLATFORMS instead")


def main() -> None:
    """The harness's own command line, which knows `--model turbojax` then."""
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()


if __name__ == "__main__":
    main()
