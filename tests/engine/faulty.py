"""Runners whose steps fail as told."""

from tests.engine.harness import StrictRunner, slots_of
from turbojax.engine.plan import StepResult
from turbojax.errors import SlotError


class FaultyRunner(StrictRunner):
    """Fails as told; a step that failed has lost the state, so nothing runs before `reset`.

    Attributes:
        transient: {number of a dispatch: "dispatch" or "fetch"}: that step fails there, once, unless it is of one
            request behind an earlier fault, which would rightly be blamed.
        poison: {request id: length}: a step that brings the request to that length fails, each time.
        not_finite: {request id: length}: at that length its logits are not finite.
        names_slots: errors name the slot.
        is_lost: so is the device: `reset` fails too.
        too_many: a step of so many sequences fails.
    """

    def __init__(self, *args):
        super().__init__(*args)
        self.transient, self.poison, self.not_finite = {}, {}, {}
        self.names_slots, self.is_lost, self.too_many = False, False, 1 << 30
        self.has_state = True

    def dispatch(self, plan):
        assert self.has_state, "a step on lost state"
        place = self.transient.pop(self.num_dispatched, None)
        handle = super().dispatch(plan)
        if self.num_resets and len(slots_of(plan)) == 1:
            place = None
        bad = [slot for slot in slots_of(plan) if self.reached(slot, self.poison)]
        if bad and self.names_slots:
            self.lose(SlotError(bad[0], "page 99 is no page"))
        if place == "dispatch" or (bad and len(bad) % 2):
            self.lose(MemoryError("out of memory"))
        if len(slots_of(plan)) >= self.too_many:
            self.lose(MemoryError("too many sequences"))
        handle.fails = place == "fetch" or bool(bad)
        return handle

    def reached(self, slot, lengths):
        state = self.slots[slot]
        return state["length"] >= lengths.get(state["join"].sampling.seed, 1 << 30)

    def lose(self, error):
        self.has_state = False
        raise error

    def fetch(self, handle):
        if handle.fails:
            self.lose(RuntimeError("the step failed"))
        return super().fetch(handle)

    def sample(self, slot, masks):
        token = super().sample(slot, masks)
        if not self.reached(slot, self.not_finite):
            return token
        self.slots[slot]["active"] = False
        return -2

    def reset(self):
        if self.is_lost:
            raise RuntimeError("no device")
        super().reset()
        self.has_state = True


class FetchesFlags(FaultyRunner):
    """Hands out flags as the device does: a negative token in place of the one that could not be picked."""

    def fetch(self, handle):
        result = super().fetch(handle)
        flagged = frozenset(slot for slot, tokens in result.tokens.items() if -2 in tokens)
        return StepResult(result.step_id, {s: [t for t in ts if t >= 0] for s, ts in result.tokens.items()}, flagged)
