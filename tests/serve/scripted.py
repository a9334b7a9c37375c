"""An engine that says what it is told, with a real tokenizer of bytes and a chat template that shows tools."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from tests.engine.fake import FakeRunner
from turbojax.api import Pipeline
from turbojax.engine.block_pool import BlockPool
from turbojax.engine.scheduler import Scheduler, SchedulerConfig
from turbojax.tokenizer import Tokenizer

END = "<|im_end|>"
SPECIAL = (END, "<|im_start|>", "[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]", "<|python_tag|>")
ADDED = ("<tool_call>", "</tool_call>", "<think>", "</think>")  # tokens that are not special, as Qwen has them
# ChatML with tools as Qwen writes them.
TEMPLATE = """
{%- if tools %}<|im_start|>system
Tools:
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}Call one as <tool_call>{"name": ..., "arguments": ...}</tool_call>.<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}
{%- for call in message.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
THINKING_TEMPLATE = TEMPLATE.removesuffix("{% endif %}") + (
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)


def make_tokenizer(chat_template: str = TEMPLATE, *, added: tuple[str, ...] = ADDED) -> Tokenizer:
    """A token a byte, and the special and added ones behind."""
    from tokenizers import AddedToken, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as Backend
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    backend.add_tokens([AddedToken(text, special=False, normalized=False) for text in added])
    inner = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=END, clean_up_tokenization_spaces=False)
    return Tokenizer(inner, chat_template)


class ScriptedRunner(FakeRunner):
    """Samples the tokens of `script`, then ends; where a guide forbids one, the next that it allows.

    Attributes:
        script: token ids of what every request gets for an answer.
    """

    def __init__(self, num_slots: int, page_len: int, end: int) -> None:
        super().__init__(num_slots, page_len)
        self.script: list[int] = []
        self.end = end

    def sample(self, slot: int, masks: Any) -> int:
        state = self.slots[slot]
        join = state["join"]
        at = state["length"] - state.setdefault("prompt_len", state["length"])
        token = self.script[at] if at < len(self.script) else self.end
        if slot in masks:
            bits = [(word, bit) for word in range(len(masks[slot])) for bit in range(32)]
            allowed = [32 * word + bit for word, bit in bits if masks[slot][word] >> bit & 1]
            token = token if token in allowed else allowed[(token + 7 * at) % len(allowed)]
        state["last"] = token
        state["length"] += 1
        state["active"] = token not in join.stop_token_ids and state["length"] < join.max_len
        return token


class Scripted(NamedTuple):
    """A pipeline and what its model says."""

    pipe: Pipeline
    runner: ScriptedRunner

    def say(self, text: str) -> None:
        """What every request is answered from now on."""
        assert self.pipe.tokenizer is not None
        self.runner.script = self.pipe.tokenizer.encode(text, add_special_tokens=False)


@contextmanager
def scripted_pipeline(chat_template: str = TEMPLATE, *, session_len: int = 4096) -> Iterator[Scripted]:
    tokenizer = make_tokenizer(chat_template)
    end = tokenizer.eos_id
    assert end is not None
    runner = ScriptedRunner(8, 16, end)
    scheduler = Scheduler(SchedulerConfig(8, session_len, 4096, runner.max_prefill_chunks, 2), BlockPool(4096, 16))
    with Pipeline(runner, scheduler, tokenizer, vocab_size=tokenizer.vocab_size, eos_ids=(end,)) as pipe:
        yield Scripted(pipe, runner)
