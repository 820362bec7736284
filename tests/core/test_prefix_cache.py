"""Requests to reset the prefix cache: the blocks it forgets, and the blocks it must keep."""

from runtime.spec.types import SamplingParams
from tests.support.engine.sessions import Session, first_plan


def test_a_reset_keeps_only_held_blocks():
    session = Session(block_size=4, max_num_batched_tokens=64)
    scheduler, prompt = session.core.scheduler, list(range(1, 14))
    session.add(prompt, SamplingParams(max_tokens=1, ignore_eos=True))
    session.finish()
    session.add(prompt[:9], SamplingParams(max_tokens=9, ignore_eos=True))
    session.step()
    assert len(scheduler.kv_cache.cache) == 3
    scheduler.pool.evict_unheld()
    assert (len(scheduler.kv_cache.cache), scheduler.find_faults()) == (2, [])
    session.finish()
    scheduler.pool.evict_unheld()
    assert (len(scheduler.kv_cache.cache), scheduler.find_faults()) == (0, [])
    session.add(prompt, SamplingParams(max_tokens=1, ignore_eos=True))
    assert first_plan(session).num_tokens.tolist() == [13]
