"""A fake runner with a head, which checks every entry that the head reads.

A position's entry is a hash: its token, and the hash one position earlier. A device's tables keep what
their slot's last request has left. So the head must find a block, or the null block, behind a request's last one."""

import numpy as np

from runtime.core.plan import DEVICE_DRAFT
from tests.support.engine.fake_runner import VOCAB, FakeRunner, mix, sample


class HeadRunner(FakeRunner):
    """`share_right` of its draft tokens are right, and some are missing."""

    has_guards = True
    share_right = 0.8

    def __init__(self, config, info):
        super().__init__(config, info)
        self.entries = np.zeros_like(self.memory)
        self.max_len, self.most = info.max_model_len, info.head.most_drafts
        self.drafts: dict[int, list[int]] = {}
        self.rng = np.random.default_rng(0)
        self.num_checked = self.num_named = 0

    def _change_slots(self, plan):
        super()._change_slots(plan)
        for new in plan.new:
            self.drafts.pop(new.slot, None)

    def begin(self, plan):
        self.plan, self.fresh, named = plan, {new.slot for new in plan.new}, []
        at = 0
        for slot, count in zip(plan.slots.tolist(), plan.draft_lens.tolist() or [0] * len(plan.slots), strict=True):
            given, at = plan.draft_token_ids[at : at + count].tolist(), at + count
            if DEVICE_DRAFT in given:
                assert given == [DEVICE_DRAFT] * count, "a head makes all draft tokens of a row"
                given = self.drafts[slot][:count]
                assert len(given) == count, "the engine asks for draft tokens that the head has made"
            named += given
        self.named = np.array(named, np.int32)
        plan.draft_token_ids = np.where(self.named < 0, VOCAB, self.named).astype(np.int32)

    def collect(self):
        result = super().collect()
        plan, at = self.plan, 0
        assert plan.num_steps == 1
        result.draft_token_ids = self.named
        self.num_named += len(self.named)
        lens = plan.draft_lens.tolist() or [0] * len(plan.slots)
        rows = zip(
            *(a.tolist() for a in (plan.slots, plan.num_computed, plan.num_tokens, plan.num_samples)), strict=True
        )
        named = iter(self.named.tolist())
        for (slot, start, count, num_samples), num_drafts in zip(rows, lens, strict=True):
            samples, at = result.token_ids[at : at + num_samples].tolist(), at + num_samples
            drafts, num_accepted = [next(named) for _ in range(num_drafts)], 0
            while num_accepted < len(drafts) and drafts[num_accepted] == samples[num_accepted]:
                num_accepted += 1
            tokens = self.tokens[slot]
            for i, token in enumerate(samples):
                tokens[start + count - num_samples + 1 + i] = token
            first = start + 1 - (slot in self.fresh and start > 0)
            for position in range(first, min(start + count + 1, self.max_len)):
                if position in tokens:
                    self._store(slot, position)
            self.drafts.pop(slot, None)
            if samples and min(samples[: num_accepted + 1]) >= 0:
                last = start + count - num_samples + 1 + num_accepted
                self._check(slot, last)
                self._draft(slot, last, plan.next_drafts)
        return result

    def _store(self, slot, position):
        block = self.tables[slot][position // self.size]
        assert block, "a request has a block for the position behind its row"
        self.entries[block, position % self.size] = self._entry(slot, position)

    def _entry(self, slot, position):
        before = self.memory[self.tables[slot][(position - 1) // self.size], (position - 1) % self.size]
        return mix(int(before), self.tokens[slot][position] + 1000)

    def _check(self, slot, last):
        """Each entry before a draft is right for the request's tokens."""
        for position in range(1, min(last + 1, self.max_len)):
            found = self.entries[self.tables[slot][position // self.size], position % self.size]
            assert found == self._entry(slot, position), "an entry of the head is missing or another's"
            self.num_checked += 1

    def _draft(self, slot, last, count):
        state = int(self.memory[self.tables[slot][(last - 1) // self.size], (last - 1) % self.size])
        state, drafts = mix(state, self.tokens[slot][last]), []
        for i in range(count):
            if i and last + i < self.max_len and (block := self.tables[slot][(last + i) // self.size]):
                self.entries[block, (last + i) % self.size] = -1  # what a draft token leaves behind
            right, missing = self.rng.random() < self.share_right, self.rng.random() < 0.05
            drafts.append(-1 if missing else sample(state) if right else int(self.rng.integers(VOCAB)))
            state = mix(state, drafts[-1])
        self.drafts[slot] = drafts
