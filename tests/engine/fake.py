"""A runner without a device: keeps what the pool holds by page, refuses plans that a real pool could not serve."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

import numpy as np

from turbojax.engine.plan import PrefillChunk, RowOutputs, StepPlan, StepResult, TokenLogprobs

VOCAB = 50


def next_token(tokens: list[int]) -> int:
    """The model: a function of the whole sequence."""
    return (sum((i + 1) * t for i, t in enumerate(tokens)) * 31 + len(tokens)) % VOCAB


def continuation(prompt, max_len: int, stop_ids=()) -> list[int]:
    """What a request must give, computed alone."""
    tokens = list(prompt)
    while len(tokens) < max_len:
        tokens.append(next_token(tokens))
        if tokens[-1] in stop_ids:
            break
    return tokens[len(prompt) :]


def rows_of(wants, position: int, num_rows: int) -> RowOutputs:
    """Outputs that say where they stand: the row at position p has p in its logits, hidden state and logprobs."""
    positions = np.arange(position, position + num_rows, dtype=np.float32)
    is_chunk = isinstance(wants, PrefillChunk)
    num_logprobs = wants.num_prompt_logprobs if is_chunk else wants.num_logprobs
    logprobs = None
    if num_logprobs is not None:
        top = list(range(num_logprobs))
        logprobs = [TokenLogprobs(-p, -p - 0.5, top, [-p - t for t in top], [-p for _ in top]) for p in positions]
        if is_chunk and wants.next_token_id < 0:
            logprobs.pop()
    return RowOutputs(
        logprobs,
        np.repeat(positions[:, None], VOCAB, 1) if wants.output_logits else None,
        np.repeat(positions[:, None], 3, 1) if wants.output_hidden else None,
    )


@dataclass
class FakeHandle:
    """A step: its plan, the slots that need a mask, what came of it, and whether it fails when it is fetched."""

    plan: StepPlan
    guided: frozenset[int]
    fails: bool = False
    tokens: dict[int, list[int]] = field(default_factory=dict)
    outputs: dict[int, RowOutputs] = field(default_factory=dict)
    prompt_outputs: dict[int, RowOutputs] = field(default_factory=dict)


class FakeRunner:
    """Executes plans in dispatch order; tokens are handed out at fetch."""

    def __init__(self, num_slots: int, page_len: int, max_prefill_chunks: int = 4) -> None:
        self.num_slots, self.page_len, self.max_prefill_chunks = num_slots, page_len, max_prefill_chunks
        self.pages: dict[int, dict[int, int]] = {}  # page -> offset -> token written
        self.slots: dict[int, dict] = {}
        self.unpicked: FakeHandle | None = None  # a step that waits for its masks
        self.num_dispatched = 0
        self.num_resets = 0
        self.is_closed = False

    def dispatch(self, plan: StepPlan):
        self.num_dispatched += 1
        assert not (plan.prefill_chunks and plan.num_decode_steps != 1)
        for page in plan.dirty_pages:
            self.pages[page] = {}
        self.copy_pages(plan)
        for join in plan.joins:
            assert 0 <= join.slot < self.num_slots
            self.slots[join.slot] = {"table": list(join.page_ids[0]), "join": join, "length": 0, "active": False}
        for grant in plan.page_grants:
            table = self.slots[grant.slot]["table"]
            assert grant.page_index == len(table), "grants continue the table"
            table.append(grant.page_id)
        named = [*plan.decode_slots, *(c.slot for c in plan.prefill_chunks)]
        assert not any(0 in self.slots[slot]["table"] for slot in named)
        assert len(set(named)) == len(named), "a slot is named twice"
        samples = [*plan.decode_slots, *(c.slot for c in plan.prefill_chunks if c.is_last)]
        handle = FakeHandle(plan, frozenset(s for s in samples if self.slots[s]["join"].has_guide))
        assert self.unpicked is None, "a later step needs the tokens of one that has not sampled"
        assert plan.num_decode_steps == 1 or all(self.slots[s]["join"].is_plain for s in samples)
        if handle.guided:
            self.unpicked = handle
        else:
            self.run(handle, {})
        return handle

    def pick(self, handle, masks) -> None:
        assert handle is self.unpicked
        assert masks.keys() == handle.guided
        self.unpicked = None
        self.run(handle, masks)

    def run(self, handle, masks) -> None:
        """The forward pass and the sampling of a step."""
        plan, tokens, outputs = handle.plan, handle.tokens, handle.outputs
        for slot in plan.decode_slots:
            tokens[slot] = []
            for _ in range(plan.num_decode_steps):
                state = self.slots[slot]
                if not state["active"]:
                    continue
                self.write(slot, state["length"] - 1, [state["last"]])
                tokens[slot].append(self.sample(slot, masks))
                outputs[slot] = rows_of(state["join"], state["length"] - 2, 1)
        for chunk in plan.prefill_chunks:
            self.write(chunk.slot, chunk.num_history_tokens, chunk.token_ids)
            state = self.slots[chunk.slot]
            state["length"] = chunk.num_history_tokens + len(chunk.token_ids)
            if not chunk.is_plain:
                handle.prompt_outputs[chunk.slot] = rows_of(chunk, chunk.num_history_tokens, len(chunk.token_ids))
            if chunk.is_last:
                state["active"] = True
                tokens[chunk.slot] = [self.sample(chunk.slot, masks)]
                outputs[chunk.slot] = rows_of(state["join"], state["length"] - 2, 1)

    def copy_pages(self, plan: StepPlan) -> None:
        for copy in plan.page_copies:
            source = self.pages[copy.source_id]
            self.pages[copy.target_id] = {offset: source[offset] for offset in range(copy.num_tokens)}

    def write(self, slot: int, position: int, token_ids) -> None:
        table = self.slots[slot]["table"]
        for i, token in enumerate(token_ids, start=position):
            self.pages.setdefault(table[i // self.page_len], {})[i % self.page_len] = int(token)

    def sample(self, slot: int, masks) -> int:
        state = self.slots[slot]
        table, join = state["table"], state["join"]
        known = [self.pages[table[i // self.page_len]][i % self.page_len] for i in range(state["length"])]
        state["last"] = next_token(known)
        while slot in masks and not masks[slot][state["last"] // 32] >> (state["last"] % 32) & 1:
            state["last"] = (state["last"] + 1) % VOCAB
        state["length"] += 1
        stopped = state["last"] in join.stop_token_ids or state["length"] >= join.max_len
        state["active"] = not stopped
        return state["last"]

    def reset(self) -> None:
        self.pages.clear()
        self.slots.clear()
        self.unpicked = None
        self.num_resets += 1

    def close(self) -> None:
        self.is_closed = True

    def fetch(self, handle) -> StepResult:
        assert handle is not self.unpicked
        return StepResult(
            handle.plan.step_id, handle.tokens, outputs=handle.outputs, prompt_outputs=handle.prompt_outputs
        )


class GatedRunner(FakeRunner):
    """Runs no step while its gate is shut."""

    def __init__(self, num_slots: int, page_len: int) -> None:
        super().__init__(num_slots, page_len)
        self.gate = threading.Event()
        self.gate.set()

    def dispatch(self, plan: StepPlan):
        assert self.gate.wait(10)
        return super().dispatch(plan)


def prompt_of(length: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, VOCAB, length).astype(np.int32)
