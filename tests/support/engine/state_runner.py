"""A runner with recurrent states. A wrong state changes every later sample.

States are hashes in which the form of a token counts: one hash for tokens of chunks, another for single steps. The
runner stores them as kernels do (runtime/kernels/step/state_rows.py): the state lags behind a ring of last tokens."""

import numpy as np

from runtime.base.kv_cache_spec import RING, KVCacheSpec, KVGroupSpec, StateGroupSpec
from runtime.kernels.step.state_rows import LAG, MOST_PENDING
from tests.support.engine.fake_runner import FakeRunner, mix

STEP = 1 << 40  # added to a token that is computed as a single step


def with_states(chunk: int) -> KVCacheSpec:
    full = KVGroupSpec((0, 2), num_kv_heads=1, head_dim=8, dtype="float32")
    return KVCacheSpec((full,), StateGroupSpec((1, 3), channels=8, dtype="float32", chunk=chunk))


class StateRunner(FakeRunner):
    """A runner with states. It checks how prompts are cut into rows."""

    def __init__(self, config, info) -> None:
        super().__init__(config, info)
        self.chunk = info.kv_cache.states.chunk
        self.rows_of_states = [(0, 0)] * info.num_states  # tokens that the state covers, and its hash
        self.rings: dict[int, dict[int, int]] = {}  # slot -> position modulo RING -> token
        self.row_of: dict[int, int] = {}
        self.prompt_ends: dict[int, int] = {}
        self.taken: dict[int, tuple[int, int]] = {}
        self.values: dict[int, dict[int, int]] = {}  # slot -> position -> state after it, of the current row
        self.is_step = np.zeros(self.memory.shape, bool)  # the form in which a block's tokens were computed
        self.num_wrong = 0

    def forget(self) -> None:
        super().forget()
        self.rows_of_states = [(-1, -1)] * len(self.rows_of_states)

    def begin(self, plan) -> None:
        for new in plan.new:
            assert new.state > 0
            if new.snapshot:
                self.rows_of_states[new.state] = self.rows_of_states[new.snapshot]
            self.row_of[new.slot], self.prompt_ends[new.slot] = new.state, new.prompt_len - 1
            self.rings[new.slot] = {}
        live = [self.row_of[slot] for slot in self.tokens]
        assert len(set(live)) == len(live), "a row of states belongs to one request"
        self.taken = {slot: (position, row) for slot, position, row in plan.snapshots.T.tolist()}
        assert not {row for _, row in self.taken.values()} & set(live)

    def attend(self, slot: int, position: int) -> None:
        self.is_step[self.place(slot, position)] = position >= self.prompt_ends[slot]

    def place(self, slot: int, position: int) -> tuple[int, int]:
        return self.tables[slot][position // self.size], position % self.size

    def begin_row(self, slot: int, start: int, count: int) -> None:
        for at in range(start):
            assert self.is_step[self.place(slot, at)] == (at >= self.prompt_ends[slot]), "a block of another form"
        row, prompt_end, tokens, ring = self.row_of[slot], self.prompt_ends[slot], self.tokens[slot], self.rings[slot]
        covered, value = self.rows_of_states[row] if start else (0, 0)
        end, values = start + count, {}
        position, snapshot = self.taken.get(slot, (0, 0))
        assert not position or start < position <= min(end, prompt_end)
        if start < prompt_end:
            assert start % self.chunk == 0
            assert end % self.chunk == 0 or end > prompt_end
            assert start == covered, "a prompt continues where its state ends"
            for at in range(start, min(end, prompt_end)):
                values[at] = value = mix(value, tokens[at])
                if at + 1 == position:
                    self.rows_of_states[snapshot] = position, value
            covered = min(end, prompt_end)
            self.rows_of_states[row] = covered, value
        first = max(start, prompt_end)
        stored = max(covered, first - LAG, end - MOST_PENDING)
        for at in range(covered, end):
            if at == stored:
                self.rows_of_states[row] = at, value
            if at >= first:
                ring[at % RING] = tokens[at]
            values[at] = value = mix(value, ring[at % RING] + STEP)
        self.values[slot] = values

    def hidden(self, slot: int, position: int, state: int) -> int:
        value, tokens = 0, self.tokens[slot]
        for at in range(position + 1):
            value = mix(value, tokens[at] + (STEP if at >= self.prompt_ends[slot] else 0))
        is_right = self.values[slot][position] == value
        self.num_wrong += not is_right
        return state if is_right else state ^ value
