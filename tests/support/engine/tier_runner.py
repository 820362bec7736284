"""A fake region, runners that copy blocks to and from it, and sessions of engines with a tier.

A block's bytes are hashes of its tokens, so a wrong byte is a wrong token. Copies take random times, and the region
refuses, evicts, damages and loses entries at random."""

from dataclasses import dataclass, replace
from random import Random

import numpy as np

from runtime.assembly.engine import build_engine
from runtime.base.images import ImageInfo
from runtime.base.model_info import TierInfo
from runtime.base.types import CallboardError
from runtime.base.weight_version import WeightVersion
from runtime.core.extra import Extra
from runtime.core.plan import StepResult, decode_result, encode_result
from runtime.core.request_state import RequestStatus
from runtime.policy.admission import Admission
from runtime.speculation.choose_k import Speculation
from runtime.tier.extra import Tier
from runtime.tier.keys import split
from runtime.tier.region import RegionBusy, RegionFigures
from tests.support.engine.fake_runner import (
    IMAGE,
    FakeRunner,
    FixedPacing,
    FixedShare,
    Oracle,
    before_all,
    check_integrity,
    mix,
    of_versions,
    sequential,
    sequential_scores,
    sequential_vector,
)
from tests.support.engine.image_runner import ImageRunner
from tests.support.engine.sessions import STEP_US, TURN, Session, make
from tests.support.engine.state_runner import StateRunner, with_states
from tests.support.engine.window_runner import WindowRunner, groups

STATE_SLOTS = 2
GARBAGE = -7


@dataclass
class Entry:
    """A place in the region."""

    payload: object = None  # None until it is written
    is_damaged: bool = False
    expires: float = 0


class FakeRegion:
    """A TierIndex, with the payloads. It outlives engines and runners."""

    def __init__(self, seed: int = 0, room: int = 1 << 30, chaos: float = 0.0) -> None:
        self.rng, self.room, self.chaos = Random(seed), room, chaos
        self.entries: dict[bytes, Entry] = {}
        self.truth: dict[bytes, object] = {}  # what was ever written for a key
        self.salts: dict[bytes, int] = {}
        self.num_damaged = self.num_evicted = 0
        self.num_busy = 0  # the next reservations, while another process has the lock

    def _happens(self) -> bool:
        return self.rng.random() < self.chaos

    def find(self, keys: bytes) -> np.ndarray:
        return np.array([self.is_ready(key) for key in split(keys)], bool)

    def is_ready(self, key: bytes) -> bool:
        return key in self.entries and self.entries[key].payload is not None

    def touch(self, keys: bytes, expires: float = 0) -> None:
        for key in reversed(split(keys)):
            if key in self.entries:
                self.entries[key] = entry = self.entries.pop(key)
                entry.expires = expires or entry.expires

    def reserve(self, keys: bytes, salt: int, expires: float = 0) -> np.ndarray:
        if self.num_busy or self._happens():
            self.num_busy = max(0, self.num_busy - 1)
            raise RegionBusy("Another process has the lock.")
        self.touch(keys, expires)
        return np.array([self._reserve(key, salt, expires) for key in split(keys)], bool)

    def _reserve(self, key: bytes, salt: int, expires: float) -> bool:
        if key in self.entries:
            return False
        while len(self.entries) >= self.room:
            if (victim := next((k for k, entry in self.entries.items() if entry.payload is not None), None)) is None:
                return False
            self.evict(victim)
        self.entries[key], self.salts[key] = Entry(expires=expires), salt
        return True

    def drop(self, keys: bytes) -> None:
        for key in split(keys):
            self.entries.pop(key, None)

    def evict(self, key: bytes) -> None:
        del self.entries[key]
        self.num_evicted += 1

    def abandon(self) -> None:
        """All writers have ended."""
        self.entries = {key: entry for key, entry in self.entries.items() if entry.payload is not None}

    def disturb(self) -> None:
        """Evict and damage some entries."""
        for key in list(self.entries):
            if self.entries[key].payload is not None and self._happens():
                if self.rng.random() < 0.5:
                    self.evict(key)
                else:
                    self.entries[key].is_damaged = True
                    self.num_damaged += 1

    def figures(self) -> RegionFigures:
        return RegionFigures(sum(entry.payload is not None for entry in self.entries.values()), self.room, 0)

    # For runners:

    def commit(self, key: bytes, payload: object) -> None:
        if key in self.entries:
            assert self.truth.setdefault(key, payload) == payload, "one key has two contents"
            self.entries[key].payload = payload

    def load(self, key: bytes) -> object:
        entry = self.entries.get(key)
        return None if entry is None or entry.is_damaged else entry.payload


class Copies(FakeRunner):
    """Copies blocks. Mixed in before another runner."""

    region: FakeRegion

    def __init__(self, config, info) -> None:
        super().__init__(config, info)
        self.transfers = []  # number, is_store, group, block, part, key, payload
        self.parts: dict[int, dict[int, object]] = {}  # row -> loaded parts of its state
        self.max_in_flight = 0
        self.delays = True

    def forget(self) -> None:
        super().forget()
        self.transfers.clear()

    def begin(self, plan) -> None:
        super().begin(plan)
        for transfers, is_store in ((plan.stores, True), (plan.loads, False)):
            if transfers is None:
                continue
            columns = (transfers.numbers, transfers.groups, transfers.blocks, transfers.parts)
            rows = zip(*(column.tolist() for column in columns), split(transfers.keys), strict=True)
            for number, group, block, part, key in rows:
                assert block != 0
                payload = self.read(group, block, part) if is_store else None
                assert all(number != other for other, *_ in self.transfers)
                assert is_store or all(other[1] or other[2:5] != (group, block, part) for other in self.transfers)
                if not is_store:
                    self.write(group, block, part, GARBAGE)
                self.transfers.append((number, is_store, group, block, part, key, payload))
        self.max_in_flight = max(self.max_in_flight, len(self.transfers))

    def begin_row(self, slot: int, start: int, count: int) -> None:
        super().begin_row(slot, start, count)
        if isinstance(self, ImageRunner):
            return
        state = before_all(self.adapters[self.adapter_of[slot]], self.weights)
        for at in range(start):
            state = mix(state, self.tokens[slot][at])
            assert self.memory[self.tables[slot][at // self.size], at % self.size] == state, "a wrong block"

    def read(self, group: int, block: int, part: int) -> object:
        if group < 0:
            return part, self.rows_of_states[block]
        return (
            self.memory[block].tobytes(),
            *([self.is_step[block].tobytes()] if isinstance(self, StateRunner) else []),
        )

    def write(self, group: int, block: int, part: int, payload: object) -> None:
        if group >= 0:
            self.memory[block] = GARBAGE if payload == GARBAGE else np.frombuffer(payload[0], np.int64)
            if isinstance(self, StateRunner) and payload != GARBAGE:
                self.is_step[block] = np.frombuffer(payload[1], bool)
            return
        if payload == GARBAGE:
            self.rows_of_states[block] = -1, -1
            if not part:  # the first one; an earlier load may have left another part
                self.parts[block] = {}
            return
        assert payload[0] == part
        parts = self.parts[block]
        parts[part] = payload[1]
        if len(parts) == STATE_SLOTS:
            assert len(set(parts.values())) == 1, "parts of two states"
            self.rows_of_states[block] = payload[1]
            del self.parts[block]

    def collect(self) -> StepResult:
        result = super().collect()
        self.region.disturb()
        rng, left, ended = self.region.rng, [], {"stored": [], "loaded": [], "damaged": []}
        for transfer in self.transfers:
            number, is_store, group, block, part, key, payload = transfer
            if self.delays and rng.random() < 0.4:
                left.append(transfer)
            elif is_store:
                self.region.commit(key, payload)
                ended["stored"].append(number)
            elif (found := self.region.load(key)) is None:
                ended["damaged"].append(number)
            else:
                assert found == self.region.truth[key]
                self.write(group, block, part, found)
                ended["loaded"].append(number)
        self.transfers = left
        for name, numbers in ended.items():
            setattr(result, name, np.array(numbers, np.int32))
        return decode_result(encode_result(result))


class PlainCopies(Copies):
    """One group, no window."""


class WindowCopies(Copies, WindowRunner):
    """Two groups, one with a window."""


class StateCopies(Copies, StateRunner):
    """States."""


class ImageCopies(Copies, ImageRunner):
    """Images."""


RUNNERS = {"plain": PlainCopies, "windows": WindowCopies, "states": StateCopies, "images": ImageCopies}


class TierSession(Session):
    """A Session of an engine with a tier. The engine may die, and another one goes on with the same region."""

    def __init__(
        self, kind="plain", region=None, least_tokens=1, window=5, num_snapshots=6, slot_mib=64, worth=True,
        too_many=False, share_right=None, fixed=None, most_beside=None, device="cuda", **kw,
    ) -> None:  # fmt: skip
        self.kind, self.region, self.worth = kind, region or FakeRegion(), worth
        self.too_many = too_many
        self.least_tokens, self.speculation, self.most_beside = least_tokens, (share_right, fixed), most_beside
        kw |= {"prefix_cache": True, "kv_layout": "paged"}
        if kind == "windows":
            kw["kv_cache"] = groups(window)
        elif kind == "images":
            kw["images"] = ImageInfo(IMAGE, 16, 16)
        elif kind == "states":
            seqs = kw.setdefault("max_num_seqs", 4)
            kw["block_size"] = min(kw.get("block_size", 4), 4) & 6 or 1
            kw["max_num_batched_tokens"] = max(kw.get("max_num_batched_tokens", 0), 4 + seqs)
            kw |= {"kv_cache": with_states(4), "num_states": 1 + seqs + num_snapshots}
        config, info = make(**kw)
        tier = TierInfo("folder", "layout", slot_mib << 20, 100, state_slots=STATE_SLOTS if kind == "states" else 0)
        self.config, self.info = config, replace(info, tier=tier, weights=WeightVersion(), device=device)
        self.serial, self.num_wrong, self.clock = 0, 0, 0.0
        self.runner_type = self._new_runner
        self.runner, self.core = self._new_runner(config, self.info), None
        self._new_core()
        self.added, self.outputs, self.reasons, self.scores, self.vectors = {}, {}, {}, {}, {}
        self.aborted, self.versions, self.num_loading = set(), {}, 0
        self.steps = self.guessed = self.accepted = 0
        self.figures = dict.fromkeys(self.tier.stats(), 0.0)

    def _new_runner(self, config, info):
        runner_type = type("Runner", (RUNNERS[self.kind],), {"region": self.region})
        runner = runner_type(config, info)
        runner.weights = self.serial
        return runner

    def _new_core(self) -> None:
        share_right, fixed = self.speculation
        speculation = None if share_right is None else Speculation(Oracle(share_right), fixed, STEP_US, 0.2)
        self.tier = Tier(self.info, self.region, lambda: self.clock, lambda: 300.0, self.least_tokens)
        if self.worth:
            self.tier.costs.is_worth = lambda num_bytes, num_tokens: True
        pacing = FixedPacing(self.most_beside)
        self.core = build_engine(self.config, self.info, self.runner, speculation, pacing, self.tier)
        if self.too_many:
            self.core.extras[Admission].lengths = FixedShare(0.0)

    def add(self, prompt, params, priority=0, salt="", images=()):
        if len(prompt) >= self.core.scheduler.max_len + (params.max_tokens == 0):
            return None
        try:
            name = super().add(prompt, params, priority, salt, images)
        except CallboardError as e:
            assert "One step needs" in str(e)  # noqa: PT017
            return None
        self.versions[name] = []
        return name

    def step(self) -> None:
        self.clock += 0.01
        super().step()
        for name, tokens in self.outputs.items():
            self.versions[name] += [self.serial] * (len(tokens) - len(self.versions[name]))
        loading = [s for s in self.core.scheduler.requests.values() if s.status is RequestStatus.LOADING]
        assert set(loading) == set(self.tier.held())
        assert all(state.slot is None for state in loading)
        self.num_loading += len(loading)

    def lose(self) -> None:
        self._count_wrong()
        super().lose()

    def _count_wrong(self) -> None:
        self.num_wrong += getattr(self.runner, "num_wrong", 0)

    def die(self) -> None:
        """The engine and its runner are gone. Another engine goes on with all streams."""
        self._count_wrong()
        for name, value in self.tier.stats().items():
            self.figures[name] += value
        self.region.abandon()
        self.runner = self._new_runner(self.config, self.info)
        self._new_core()
        for name, request in self.added.items():
            if name in self.reasons or name in self.aborted:
                continue
            if request.params.prompt_logprobs is None and not request.params.pooled:
                request = replace(request, token_ids=[*request.token_ids, *self.outputs[name]])
            else:  # from the start
                self.outputs[name], self.versions[name] = [], []
                self.scores.pop(name, None)
                self.vectors.pop(name, None)
            self.core.add(request)

    def use_weights(self) -> None:
        submit, self.core.submit = self.core.submit, lambda late=False: []
        while self.core.scheduler.num_in_flight:
            self.step()
        self.core.submit = submit
        self.serial += 1
        self.runner.weights = self.serial
        version = self.info.weights.after(f"u{self.serial}", None, True)
        self.info = replace(self.info, weights=version, fingerprint=version.fingerprint("f"))
        self.core.scheduler.use_weights(self.info, False)
        check_integrity(self.core)

    def play(self, history) -> None:
        for kind, value in history:
            if kind == "die":
                self.die()
            elif kind == "clear":  # the device forgets what no request holds
                self.core.scheduler.pool.evict_unheld()
            elif kind == "again":  # all prompts
                for name, request in list(self.added.items())[-5:]:
                    if name not in self.aborted:
                        self.add(request.token_ids, TURN, 0, request.cache_salt, request.images)
            elif kind == "weights":
                if self.kind in ("plain", "windows"):
                    self.use_weights()
            else:
                super().play([(kind, value)])

    def finish(self, most: int = 6000) -> None:
        while self.core.has_work:
            self.step()
            assert self.steps < most, "the engine makes no progress"
        self._count_wrong()
        assert self.num_wrong == 0
        scheduler = self.core.scheduler
        assert scheduler.num_in_flight == 0
        assert not scheduler.kv_cache.lent
        assert scheduler.pool.num_available == scheduler.pool.num_blocks - 1, "blocks leaked"
        assert not self.runner.transfers
        assert not any((self.tier._live, self.tier._transfers, self.tier._arriving, self.tier._loading))
        for name, request in self.added.items():
            if name in self.aborted:
                continue
            assert name in self.reasons
            if not self.serial:
                assert (self.outputs[name], self.reasons[name]) == sequential(request, scheduler.max_len)
                assert self.scores.get(name, []) == sequential_scores(request)
                assert self.vectors.get(name) == sequential_vector(request)
            elif request.params.max_tokens and not request.params.pooled:
                versions = list(enumerate(map(str, self.versions[name])))
                assert self.outputs[name] == of_versions(request, self.outputs[name], versions)

    def total(self, name: str) -> float:
        """A figure of all engines in this session."""
        return self.figures[name] + self.tier.stats()[name]


def without_tier(core) -> list[Extra]:
    return [extra for extra in core.extras._all if not isinstance(extra, Tier)]
