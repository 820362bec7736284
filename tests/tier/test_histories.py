"""Engines with a tier: any history gives the sequential tokens, whatever happens to copies, entries and processes.

CALLBOARD_TIER_HISTORIES sets how many histories each kind of model has."""

import os
from collections import Counter

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.core.test_images import requests_with_images
from tests.support.engine.sessions import configs, events_of, requests, turns
from tests.support.engine.tier_runner import FakeRegion, TierSession
from tests.support.examples import examples

NUM_HISTORIES = int(os.environ.get("CALLBOARD_TIER_HISTORIES", "0"))
more = (
    st.tuples(st.just("preempt"), st.integers(0, 5)),
    st.tuples(st.just("clear"), st.none()),
    st.tuples(st.just("weights"), st.none()),
)
breaks = st.sampled_from(["clear", "clear", "clear", "die", "die", "lose"]).map(lambda kind: (kind, None))


def histories_of(requests):
    """Lists of events. After some the device or the engine forgets, and turns and equal prompts follow."""
    part = st.tuples(
        events_of(requests, *more), breaks, st.lists(st.one_of(turns, st.just(("again", None))), max_size=6)
    )
    parts = st.lists(part, min_size=1, max_size=4)
    return parts.map(lambda parts: [event for some, gap, then in parts for event in [*some, ("step", 12), gap, *then]])


histories, image_histories = histories_of(requests()), histories_of(requests_with_images())
regions = st.builds(
    FakeRegion,
    seed=st.integers(0, 1 << 20),
    room=st.sampled_from([10, 40, 1000, 1000]),
    chaos=st.sampled_from([0.0, 0.002, 0.01, 0.05]),
)
tiers = st.fixed_dictionaries(
    {
        "least_tokens": st.sampled_from([1, 1, 4, 8]),
        "slot_mib": st.sampled_from([1, 64, 256]),
        "worth": st.sampled_from([True, True, True, False]),
        "window": st.sampled_from([1, 2, 5, 9, 40]),
        "num_snapshots": st.integers(0, 6),
        "max_model_len": st.integers(24, 64),
        "num_kv_blocks": st.integers(8, 30),
    }
)


@pytest.mark.parametrize("kind", ["plain", "windows", "states", "images"])
def test_any_history_gives_the_sequential_tokens(kind):
    seen = Counter()

    @settings(
        max_examples=NUM_HISTORIES or examples(200), suppress_health_check=list(HealthCheck), database=None,
        derandomize=True, deadline=None, phases=[Phase.generate],
    )  # fmt: skip
    @given(configs, tiers, image_histories if kind == "images" else histories, regions, st.booleans())
    def run(config, tier, history, region, too_many):
        session = TierSession(kind, region, too_many=too_many, **config | tier)
        session.play(history)
        session.finish()
        seen["preemptions"] += sum(kind == "preempt" for kind, _ in history)
        seen["loading"] += session.num_loading
        seen["chaos"] += region.num_damaged + region.num_evicted
        for name in ("hit_tokens", "loaded_blocks", "stored_blocks", "damaged"):
            seen[name] += int(session.total(f"tier_{name}"))

    run()
    count = NUM_HISTORIES or examples(200)
    assert seen["stored_blocks"] > 5 * count, seen
    assert seen["loaded_blocks"] > count // 3, seen
    assert seen["hit_tokens"] > count // 2, seen
    assert seen["loading"] > count // 3, seen
    assert seen["damaged"] > count // 50, seen
    assert seen["chaos"] > count, seen
    assert seen["preemptions"] > count // 50, seen
