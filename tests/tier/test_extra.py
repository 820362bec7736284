"""Loads and stores of one engine with a tier, case by case."""

from types import SimpleNamespace

import pytest

from runtime.base.model_info import TierInfo
from runtime.base.types import FinishReason, Request, SamplingParams
from runtime.core.request_state import RequestStatus
from runtime.tier.costs import Costs
from runtime.tier.keys import TierKeys, salt_number, split
from tests.support.engine.sessions import TURN
from tests.support.engine.tier_runner import TierSession

PROMPT = list(range(1, 20))
KINDS = ("plain", "windows", "states", "images")


def session_of(kind="plain", **kw) -> TierSession:
    sizes = {"block_size": 2, "num_kv_blocks": 40, "max_model_len": 64, "max_num_seqs": 4, "max_num_batched_tokens": 32}
    return TierSession(kind, **sizes | kw)


def forgetful(kind="plain", prompt=PROMPT, **kw) -> TierSession:
    """A session that has served a prompt, and has evicted it from the device."""
    session = session_of(kind, **kw)
    session.add(prompt, TURN)
    session.finish()
    session.core.scheduler.pool.evict_unheld()
    return session


def step_until_loading(session: TierSession, count=1) -> None:
    while len(session.tier.held()) < count:
        session.step()


def hits_of(session: TierSession, prompt, **kw) -> int:
    before = session.tier.stats()["tier_hit_tokens"]
    session.add(prompt, TURN, **kw)
    session.finish()
    return int(session.tier.stats()["tier_hit_tokens"] - before)


@pytest.mark.parametrize("kind", KINDS)
def test_next_engine_loads_what_the_last_one_stored(kind):
    session = forgetful(kind)
    stats, length = session.core.scheduler.stats, 16 if kind == "states" else 18
    assert hits_of(session, PROMPT) == length
    assert stats.prompt_tokens_cached == length
    session.die()
    assert hits_of(session, PROMPT) == length
    assert hits_of(session, PROMPT) == 0, "the device has them now"


def test_longer_prompt_loads_what_the_device_lacks():
    session = session_of()
    session.add([*PROMPT, *range(1, 15)], TURN)
    session.finish()
    session.core.scheduler.pool.evict_unheld()
    assert hits_of(session, PROMPT[:9]) == 8
    before = session.tier.stats()["tier_loaded_blocks"]
    assert hits_of(session, [*PROMPT, *range(1, 15)]) == 24
    assert session.tier.stats()["tier_loaded_blocks"] - before == 12


@pytest.mark.parametrize(("num_busy", "is_stored"), [(30, True), (1_000, False)])
def test_stores_try_again_while_another_engine_reserves(num_busy, is_stored):
    """A process that keeps the lock, because it is stopped, costs entries, not the engine."""
    session = session_of()
    session.tier.index.num_busy = num_busy
    session.add(PROMPT, TURN)
    session.finish()
    assert bool(session.tier.stats()["tier_stored_blocks"]) is is_stored
    assert session.tier.index.num_busy == 0 or not is_stored


def test_equal_prompts_load_once():
    session = forgetful()
    for _ in range(3):
        session.add(PROMPT, TURN)
    session.finish()
    assert session.tier.stats()["tier_loaded_blocks"] == 9
    assert session.core.scheduler.stats.prompt_tokens_cached == 3 * 18


def test_salts_are_apart():
    session = forgetful()
    assert hits_of(session, PROMPT, salt="other") == 0
    assert set(session.region.salts.values()) == {0, salt_number("other")}


def test_other_environments_are_apart():
    keys = [TierKeys(TierInfo("", "", 64, 16, environment=name), 2) for name in (b"one", b"two")]
    found = [key for each in keys for group in (0, 1) for key in split(each.block_keys([bytes(16), b"1" * 16], group))]
    assert len(set(found)) == 8


def test_aborted_request_leaves_its_load_to_end():
    session = forgetful()
    session.runner.delays = True
    name = session.add(PROMPT, TURN)
    step_until_loading(session)
    session.aborted.add(name)
    session.core.abort(name)
    assert not session.tier.held()
    session.finish()
    assert session.core.scheduler.find_faults() == []
    assert session.core.scheduler.requests == {}


def test_aborted_load_is_cut():
    """Loads are 256 MiB a block here: a plan has four."""
    session = forgetful(slot_mib=256)
    name = session.add(PROMPT, TURN)
    session.core.submit()
    assert session.core.scheduler.requests[name].status is RequestStatus.LOADING
    session.aborted.add(name)
    session.core.abort(name)
    session.finish()
    assert num_loads(session) == 8, "two plans"
    session.add(PROMPT, TURN)
    session.finish()
    assert num_loads(session) == 9, "it finds the first eight on the device, and no other"


def num_loads(session: TierSession) -> int:
    """Ended loads, good and damaged."""
    return int(session.tier.stats()["tier_loaded_blocks"] + session.tier.stats()["tier_damaged"])


def test_aborted_load_returns_its_blocks():
    """Two plans have eight blocks here, the first load's. No plan has the second load, so nothing else would end it."""
    session = session_of(slot_mib=256)
    for salt in ("", "other"):
        session.add(PROMPT, TURN, salt=salt)
    session.finish()
    pool = session.core.scheduler.pool
    pool.evict_unheld()
    free = pool.num_available
    names = [session.add(PROMPT, TURN, salt=salt) for salt in ("", "other")]
    session.core.submit()
    assert free - pool.num_available == 18
    session.aborted.add(names[1])
    session.core.abort(names[1])
    assert free - pool.num_available == 9
    session.finish()


def test_loads_of_old_weights_count_for_nothing():
    """Blocks that a load has brought before an update, or brings after it, enter no cache. The request is computed."""
    session = forgetful(slot_mib=256)
    cache, hashes = session.core.scheduler.kv_cache.cache, hashes_of(session)
    name = session.add(PROMPT, TURN)
    session.core.submit()
    assert session.core.scheduler.requests[name].status is RequestStatus.LOADING
    session.use_weights()
    assert session.core.scheduler.requests[name].status is RequestStatus.WAITING
    assert session.tier._live, "one of its blocks is not planned"
    session.finish()
    assert num_loads(session) == 8, "the last one is left out"
    assert [cache.find(block_hash) for block_hash in hashes] == [None] * len(hashes)
    assert session.tier.stats()["tier_hit_tokens"] == 0


def test_damaged_block_ends_a_hit_and_is_dropped():
    session = forgetful()
    key = split(session.tier._keys.block_keys(hashes_of(session), 0))[4]
    session.region.entries[key].is_damaged = True
    assert hits_of(session, PROMPT) == 8
    assert session.tier.stats()["tier_damaged"] == 1
    session.core.scheduler.pool.evict_unheld()
    assert hits_of(session, PROMPT) == 18, "it was stored again"


def hashes_of(session: TierSession, prompt=PROMPT) -> list[bytes]:
    name = session.add(prompt, TURN)
    state = session.core.scheduler.requests[name]
    hashes = session.core.scheduler.kv_cache.prefix_hashes(state)
    session.aborted.add(name)
    session.core.abort(name)
    return list(hashes)


@pytest.mark.parametrize("kind", ["plain", "windows", "states"])
def test_spoilt_prefix_leaves_the_tier(kind):
    session = forgetful(kind)
    assert session.region.entries
    hashes = hashes_of(session)
    session.runner.fails = 0
    name = session.add(PROMPT, TURN)
    while name not in session.reasons:
        session.step()
    assert session.reasons[name] is FinishReason.ERROR
    session.finish()
    assert not session.region.find(session.tier._keys.block_keys(hashes, 0)).any()


def test_running_requests_go_on_under_a_load():
    """The pool is nearly full. A load takes the rest, and a request that decodes must wait or be computed again."""
    session = forgetful(num_kv_blocks=20, max_model_len=36, slot_mib=256, too_many=True)
    session.add([25, 26, 27], SamplingParams(max_tokens=30, ignore_eos=True))
    for _ in range(4):
        session.step()
    session.add(PROMPT, TURN)
    session.add([24, *PROMPT], TURN)
    session.finish(400)


def test_loading_requests_have_slots_kept():
    session = session_of(max_num_seqs=2)
    for first in (20, 21, 22):
        session.add([first, *PROMPT], TURN)
    session.finish()
    session.core.scheduler.pool.evict_unheld()
    for first in (20, 21, 22):
        session.add([first, *PROMPT[:10]], TURN)
    session.core.submit()
    assert len(session.tier.held()) == 2
    session.finish()
    assert session.tier.stats()["tier_hit_tokens"] == 30


def test_loss_of_runners_returns_loading_requests():
    session = forgetful()
    name = session.add(PROMPT, TURN)
    session.core.submit()
    assert session.core.scheduler.requests[name].status is RequestStatus.LOADING
    session.lose()
    assert session.core.scheduler.requests[name].status is RequestStatus.WAITING
    session.finish()
    assert session.tier.stats()["tier_hit_tokens"] == 18


def test_load_that_kills_runners_is_left_out():
    session = forgetful()
    session.add(PROMPT, TURN)
    for number in range(2):
        session.core.submit()
        assert len(session.tier.held()) == 1, number
        session.lose()
    session.core.submit()
    assert not session.tier.held()
    session.finish()
    assert session.tier.stats()["tier_hit_tokens"] == 0


def test_tier_is_off_after_losses_in_a_row():
    session = forgetful(max_num_seqs=1)
    for first in range(3):
        session.add(PROMPT if not first else [first + 22, *PROMPT], TURN)
    for _ in range(3):
        session.core.submit()
        session.tier._transfers.setdefault(-1, None)  # a load in flight
        session.lose()
    assert not session.tier.is_on
    session.finish()
    assert not session.core.has_work


def test_short_requests_are_not_stored():
    session = session_of(least_tokens=32)
    session.add(PROMPT, TURN)
    session.finish()
    assert session.region.entries == {}


@pytest.mark.parametrize(("device", "is_stored"), [("cpu", True), ("cuda", False)])
def test_a_chats_first_turn_is_stored_on_a_cpu(device, is_stored):
    """A CPU computes 100 tokens in 0.3 s, and loads them in 3 ms."""
    session = session_of(least_tokens=None, device=device, num_kv_blocks=60, max_model_len=120)
    assert session.add([*range(1, 24)] * 4, TURN)
    session.finish()
    assert bool(session.region.entries) == is_stored


@pytest.mark.parametrize("kind", ["plain", "states"])
def test_used_prefix_is_evicted_from_its_end(kind):
    """Entries stand in the order of their use, whichever plans have stored them."""
    session = session_of(kind, slot_mib=256)
    session.add(PROMPT, TURN)
    session.finish()
    keys, hashes = session.tier._keys, hashes_of(session)
    head = split(keys.block_keys(hashes, 0))[: len(PROMPT) // 2]
    assert [key for key in session.region.entries if key in head] == head[::-1]
    session.add(list(range(20, 10, -1)), TURN)
    session.finish()
    session.add(PROMPT[:9], TURN)
    session.finish()
    assert list(session.region.entries)[-4:] == head[3::-1], "a hit on the device is a use, too"


def test_long_prompt_is_stored_before_it_ends():
    sizes = {
        "block_size": 16,
        "num_kv_blocks": 400,
        "max_model_len": 5000,
        "max_num_batched_tokens": 512,
        "slot_mib": 1,
    }
    session = session_of(**sizes | {"slot_mib": 1})
    session.add([1 + i % 20 for i in range(4500)], TURN)
    while not session.reasons and len(session.region.entries) < 128:
        session.step()
    assert not session.reasons
    assert session.core.scheduler.running[0].num_computed < 3500


def test_steps_that_decode_store_few_entries(monkeypatch):
    monkeypatch.setattr("runtime.tier.extra._STORES_BESIDE", 2)
    session, stores = session_of(slot_mib=1), {True: 0, False: 0}
    schedule = session.core.scheduler.schedule

    def scheduled():
        if (step := schedule()) is not None and step.plan.stores is not None:
            decodes = step.num_decoding > 0
            stores[decodes] = max(stores[decodes], len(step.plan.stores.numbers))
        return step

    monkeypatch.setattr(session.core.scheduler, "schedule", scheduled)
    session.add([7], SamplingParams(max_tokens=40, ignore_eos=True))
    session.add(PROMPT, TURN)
    session.finish()
    assert stores[True] == 2
    assert stores[False] > 2


def test_stores_are_planned_early(monkeypatch):
    """A step with stores takes the host long. A late plan would leave the device idle."""
    session = session_of()
    scheduler = session.core.scheduler
    monkeypatch.setattr(scheduler.extras, "planning_delay_s", lambda step: 1.0)
    session.add([7], SamplingParams(max_tokens=40, ignore_eos=True))
    session.add(PROMPT, TURN)
    delays = []
    while session.core.has_work:
        step = scheduler.schedule()
        delays.append((scheduler.planning_delay_s(), session.tier.needs_plan(), len(scheduler.slots) > 0))
        if step is not None:
            session.core.executor.submit(step.plan)
        session.core.collect()
    assert {(delay, needs) for delay, needs, has_rows in delays if has_rows} == {(1.0, False), (0.0, True)}


def test_lifetime_is_stored():
    session = session_of()
    session.clock = 100.0
    request = session.core.add(request_with_ttl(3600.0))
    assert request.request.cache_ttl_s == 3600.0
    while session.core.has_work:
        session.core.step()
    assert {entry.expires for entry in session.region.entries.values()} == {3700.0}


def request_with_ttl(ttl_s: float):

    return Request("ttl", PROMPT, len(PROMPT), TURN, cache_ttl_s=ttl_s)


def test_prompt_scores_do_not_load():
    session = forgetful()
    session.add(PROMPT, SamplingParams(max_tokens=2, prompt_logprobs=1, ignore_eos=True))
    session.finish()
    assert session.tier.stats()["tier_loaded_blocks"] == 0


def test_idle_engine_plans_no_steps_while_a_copy_runs():
    """One plan without rows is in flight at a time: its result waits in the runner."""
    session = forgetful()
    session.add(PROMPT, TURN)
    session.core.submit()
    assert session.core.scheduler.num_in_flight == 1
    session.finish()


def test_load_is_worth_its_time(monkeypatch):
    monkeypatch.delenv("CALLBOARD_TIER_SHARE")
    now, rate = SimpleNamespace(s=0.0), SimpleNamespace(tokens=0.0)
    costs = Costs("cpu", lambda: now.s, lambda: rate.tokens)
    assert costs.is_worth(50 << 20, 300)
    assert not costs.is_worth(1 << 30, 300)
    rate.tokens = 30_000.0
    assert not costs.is_worth(50 << 20, 300)
    for _ in range(3):
        now.s += 0.102
        costs.observe(1 << 30, now.s - 0.102)
    assert costs.load_rate == pytest.approx((1 << 30) / 0.1)
    assert costs.is_worth(10 << 20, 300)
    now.s += 61
    assert costs.load_rate == 0.5e9, "old samples are dropped"
