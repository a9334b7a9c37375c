"""What happens to a row of logits before a token is sampled from it: penalties, bias, processors, bans, masks.

In this order, each row by the rules of its slot, and neutral rules change no bit:

    repetition   l / p where l > 0, else l * p, of tokens of prompt or output: transformers' repetition_penalty (CTRL)
    frequency    l - f * times in the output: OpenAI's frequency_penalty
    presence     l - p of tokens of the output: OpenAI's presence_penalty
    bias         l + b: OpenAI's logit_bias
    processor    any function of the row
    bans         -inf: bad tokens, stop tokens before min_len, tokens that a mask leaves out
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
from flax import struct

from turbojax.processors import LogitsProcessor

UNUSED = -1  # of ids
IN_PROMPT = 1 << 15  # of a count: the prompt has the token
COUNT_LIMIT = IN_PROMPT - 1  # times in the output beyond this are not counted


@struct.dataclass
class LogitRules:
    """What changes the logits of each slot, `[B]` rows.

    Attributes:
        repetition_penalty, presence_penalty, frequency_penalty: float32 [B]; 1, 0 and 0 are off.
        biased_ids: int32 [B, S], different tokens; UNUSED where unused.
        bias: float32 [B, S], what is added to their logits; -inf bans a token whatever a processor makes of it.
        processor: int32 [B], number of one of the engine's processors; negative is none.
        processor_params: float32 [B, P], its parameters one behind the other.
        counts: uint16 [B, V], times in the output in the low 15 bits, and whether the prompt has the token (IN_PROMPT).
            Kept only where a rule reads it.
    """

    repetition_penalty: jax.Array
    presence_penalty: jax.Array
    frequency_penalty: jax.Array
    biased_ids: jax.Array
    bias: jax.Array
    processor: jax.Array
    processor_params: jax.Array
    counts: jax.Array


@struct.dataclass
class RuleJoins:
    """New rules of some slots, `[A]` each (see `LogitRules`); unused rows name the sink.

    Attributes:
        seen: int32 [T, 3] of (slot, token, count), each pair once; padding names no slot (the number behind the sink).
    """

    slot: jax.Array
    repetition_penalty: jax.Array
    presence_penalty: jax.Array
    frequency_penalty: jax.Array
    biased_ids: jax.Array
    bias: jax.Array
    processor: jax.Array
    processor_params: jax.Array
    seen: jax.Array


def init_rules(num_rows: int, num_vocab: int, num_biased: int, num_params: int) -> LogitRules:
    """Neutral rules."""
    return LogitRules(
        repetition_penalty=jnp.ones(num_rows, jnp.float32),
        presence_penalty=jnp.zeros(num_rows, jnp.float32),
        frequency_penalty=jnp.zeros(num_rows, jnp.float32),
        biased_ids=jnp.full((num_rows, num_biased), UNUSED, jnp.int32),
        bias=jnp.zeros((num_rows, num_biased), jnp.float32),
        processor=jnp.full(num_rows, -1, jnp.int32),
        processor_params=jnp.zeros((num_rows, num_params), jnp.float32),
        counts=jnp.zeros((num_rows, num_vocab), jnp.uint16),
    )


def neutral_at(rules: LogitRules, at: jax.Array) -> LogitRules:
    """Neutral rules for the slots `at` [A]; what nobody reads then stays as it was."""
    return replace(
        rules,
        repetition_penalty=rules.repetition_penalty.at[at].set(1.0),
        presence_penalty=rules.presence_penalty.at[at].set(0.0),
        frequency_penalty=rules.frequency_penalty.at[at].set(0.0),
        biased_ids=rules.biased_ids.at[at].set(UNUSED),
        processor=rules.processor.at[at].set(-1),
    )


def joined(rules: LogitRules, joins: RuleJoins) -> LogitRules:
    """Rules with those of some slots replaced, and their tokens counted anew.

    A call that names no slot adds counts to those of the calls before it.
    """
    at = joins.slot
    put = lambda name: getattr(rules, name).at[at].set(getattr(joins, name))  # noqa: E731
    slot, token, count = joins.seen.T
    counts = rules.counts.at[at].set(jnp.uint16(0))
    return LogitRules(
        repetition_penalty=put("repetition_penalty"),
        presence_penalty=put("presence_penalty"),
        frequency_penalty=put("frequency_penalty"),
        biased_ids=put("biased_ids"),
        bias=put("bias"),
        processor=put("processor"),
        processor_params=put("processor_params"),
        counts=counts.at[slot, token].set(count.astype(jnp.uint16), mode="drop"),
    )


def counted(rules: LogitRules, at: jax.Array, tokens: jax.Array) -> LogitRules:
    """One more of a token in the output of each slot; slots past the last count nothing.

    Args:
        rules: of all slots.
        at, tokens: int32 [M], different slots.
    """
    before = rules.counts.at[at, tokens].get(mode="fill", fill_value=0)
    after = jnp.where((before & COUNT_LIMIT) < COUNT_LIMIT, before + jnp.uint16(1), before)
    return replace(rules, counts=rules.counts.at[at, tokens].set(after, mode="drop"))


def penalised(logits: jax.Array, rules: LogitRules) -> jax.Array:
    """Logits [M, V] under the penalties of their rows."""
    times = (rules.counts & COUNT_LIMIT).astype(jnp.float32)
    repetition = jnp.where(rules.counts > 0, rules.repetition_penalty[:, None], 1.0)
    logits = jnp.where(logits > 0, logits / repetition, logits * repetition)
    presence = jnp.where(times > 0, rules.presence_penalty[:, None], 0.0)
    return logits - rules.frequency_penalty[:, None] * times - presence


def set_at(logits: jax.Array, ids: jax.Array, values: jax.Array, *, adds: bool) -> jax.Array:
    """Logits [M, V] with values [M, S] put or added at `ids` [M, S]; negative ids name nothing."""
    ids = jnp.where(ids >= 0, ids, logits.shape[-1])  # past the vocabulary, where the scatter drops them
    at = logits.at[jnp.arange(logits.shape[0])[:, None], ids]
    return at.add(values, mode="drop") if adds else at.set(values, mode="drop")


def run_processors(logits: jax.Array, rules: LogitRules, processors: Sequence[LogitsProcessor]) -> jax.Array:
    """Each row through the processor that its slot names; every processor computes every row."""
    times, in_prompt = (rules.counts & COUNT_LIMIT).astype(jnp.int32), rules.counts >= IN_PROMPT
    given = logits
    for number, processor in enumerate(processors):
        params, start = [], 0
        for shape in processor.param_shapes:
            size = math.prod(shape)
            params.append(rules.processor_params[:, start : start + size].reshape(-1, *shape))
            start += size
        found = jax.vmap(processor.function)(given, times, in_prompt, *params)
        logits = jnp.where((rules.processor == number)[:, None], found, logits)
    return logits


def is_allowed(masks: jax.Array, num_vocab: int) -> jax.Array:
    """bool [M, V] of bit masks uint32 [M, ceil(V / 32)], lowest bit first."""
    bits = (masks[:, :, None] >> jnp.arange(32, dtype=jnp.uint32)[None, None]) & jnp.uint32(1)
    return bits.reshape(masks.shape[0], -1)[:, :num_vocab] == 1


def process(
    logits: jax.Array, rules: LogitRules, forbidden_ids: jax.Array, masks: jax.Array,
    processors: Sequence[LogitsProcessor] = (),
) -> jax.Array:  # fmt: skip
    """Logits as they are sampled from, before temperature and truncation.

    Args:
        logits: float32 [M, V].
        rules: of each row.
        forbidden_ids: int32 [M, S], banned too; negative where unused.
        masks: uint32 [M, ceil(V / 32)], bit i % 32 of word i // 32 is set where token i may be sampled.
        processors: all that rules may name.
    """
    is_ban = jnp.isneginf(rules.bias)
    logits = penalised(logits, rules)
    logits = set_at(logits, jnp.where(is_ban, UNUSED, rules.biased_ids), rules.bias, adds=True)
    logits = run_processors(logits, rules, processors)
    bans = jnp.concatenate([jnp.where(is_ban, rules.biased_ids, UNUSED), forbidden_ids], axis=1)
    logits = jnp.where(is_allowed(masks, logits.shape[-1]), logits, -jnp.inf)
    return set_at(logits, bans, jnp.full(bans.shape, -jnp.inf), adds=False)
