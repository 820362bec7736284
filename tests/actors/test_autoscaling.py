"""The scaling policy: its bounds and limits, constant load, and a square wave over simulated engines."""

from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import cloudpickle
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.engine import autoscaling
from actors.engine.autoscaling import EngineFigures, ScalingPolicy, ServePolicy, engines_needed, report_of
from tests.support.examples import examples

IDLE = EngineFigures(0, 1000.0, 0, 10, 0, 100, 1e9)


def engines(count, **total):
    """Figures of equal engines that share `total`."""
    return [replace(IDLE, idle_s=0.0, **{name: value / count for name, value in total.items()})] * count


def targets(policy, seconds, loads, num_engines=1):
    """The policy's answers, once a second; `loads(second, engines)` gives the figures."""
    found = [num_engines]
    for second in range(seconds):
        found.append(policy.decide(loads(second, found[-1]), found[-1], float(second)))
    return found


def test_each_limit_alone_requests_engines():
    assert engines_needed([]) == engines_needed([IDLE]) == 0
    assert engines_needed(engines(1, num_live=24)) == 3
    assert engines_needed(engines(3, num_live=24)) == 3
    assert engines_needed(engines(2, num_used_blocks=180)) == 2
    assert engines_needed(engines(2, queued_tokens=8000, num_live=16)) == 4
    assert engines_needed(engines(1, queued_tokens=8000, num_live=1)) == 1  # no other engine could serve it
    assert engines_needed([replace(IDLE, queued_tokens=8000, num_live=1, prefill_rate=0)]) == 1 / 8


def test_scale_out_is_faster_than_scale_in():
    policy = ScalingPolicy(1, 4, 2, 10)
    busy = targets(policy, 4, lambda second, n: engines(n, num_live=24))
    assert busy == [1, 1, 1, 3, 3]
    assert targets(policy, 11, lambda second, n: engines(n, num_live=8), 3)[-2:] == [3, 2]


def test_engines_needed_within_the_delay_stay():
    policy = ScalingPolicy(1, 4, 2, 10)
    found = targets(policy, 11, lambda second, n: engines(n, num_live=11 if second == 5 else 1), 4)
    assert found[-1] == 2
    found = targets(ScalingPolicy(1, 4, 2, 10), 30, lambda second, n: engines(n, num_live=30 if second % 9 else 1), 4)
    assert set(found) == {4}


def test_no_engine_is_removed_while_another_is_lost():
    policy = ScalingPolicy(0, 4, 2, 10, 20)
    assert {policy.decide([IDLE] * 2, 3, float(second), num_restarting=1) for second in range(60)} == {3}
    assert policy.decide([replace(IDLE, idle_s=1.0)] * 3, 3, 60.0) == 3  # the delay begins when it is back
    assert policy.decide([replace(IDLE, idle_s=1.0)] * 3, 3, 70.0) == 1


def test_missing_engines_do_not_hold_back_scale_in():
    policy = ScalingPolicy(0, 4, 2, 10, 20)
    assert targets(policy, 40, lambda second, n: [replace(IDLE, idle_s=float(second))], 4)[-1] == 0
    assert set(targets(policy, 60, lambda second, n: [], 1)) == {1}  # the first one, which a request has requested


def test_the_last_engine_is_removed_when_idle():
    policy = ScalingPolicy(0, 4, 2, 10, 20)
    one = replace(IDLE, idle_s=19.0)
    assert policy.decide([one], 1, 0.0) == 1
    assert policy.decide([replace(one, idle_s=20.0)], 1, 1.0) == 0
    assert ScalingPolicy(1, 4, 2, 10, 20).decide([IDLE], 1, 0.0) == 1


figures = st.builds(
    EngineFigures,
    queued_tokens=st.floats(0, 1e6),
    prefill_rate=st.floats(100, 1e5) | st.just(0.0),
    num_live=st.integers(0, 500),
    max_rows=st.integers(1, 256),
    num_used_blocks=st.integers(0, 1000),
    num_blocks=st.integers(1000, 2000),
    idle_s=st.floats(0, 1e4),
)


@settings(max_examples=examples(60))
@given(st.integers(0, 3), st.integers(0, 5), st.lists(st.lists(figures, max_size=6), max_size=30))
def test_the_bounds_hold(least, more, histories):
    policy, count = ScalingPolicy(least, max(1, least + more), 1, 3, 5), least
    for second, reports in enumerate(histories):
        count = policy.decide(reports, count, float(second))
        assert least <= count <= max(1, least + more)


@settings(max_examples=examples(60))
@given(st.lists(figures, min_size=1, max_size=6), st.integers(0, 5), st.floats(0, 1e5), st.integers(0, 100))
def test_more_load_never_needs_fewer(reports, at, more_tokens, more_live):
    busier = reports.copy()
    e = busier[at % len(busier)]
    busier[at % len(busier)] = replace(e, queued_tokens=e.queued_tokens + more_tokens, num_live=e.num_live + more_live)
    assert engines_needed(busier) >= engines_needed(reports) - 1e-6


@settings(max_examples=examples(60))
@given(st.floats(0, 400), st.floats(0, 3e4), st.integers(1, 12))
def test_constant_load_never_scales_in_both_directions(num_live, tokens, start):
    policy = ScalingPolicy(1, 12, 2, 5)
    found = targets(policy, 40, lambda second, n: engines(n, num_live=num_live, queued_tokens=tokens), start)
    assert found in (sorted(found), sorted(found, reverse=True))
    assert len(set(found[-20:])) == 1


class Engines:
    """A fluid of requests, each with its share of prompt tokens and then some seconds in a row. Engines start slowly,
    and report their load once a second."""

    START_S, PREFILL_RATE, ROWS, PROMPT, DECODE_S, TICK_S = 6.0, 4000.0, 16.0, 500.0, 5.0, 0.25

    def __init__(self, num_engines):
        self.ready_at = [0.0] * num_engines
        self.num_queued = self.num_decoding = self.now = 0.0

    def advance(self, arrivals):
        """A tick in which `arrivals` requests a second arrive."""
        self.now += self.TICK_S
        self.num_queued += arrivals * self.TICK_S
        num_ready = sum(at <= self.now for at in self.ready_at)
        room = num_ready * self.ROWS - self.num_decoding
        begun = min(self.num_queued, room, num_ready * self.PREFILL_RATE / self.PROMPT * self.TICK_S)
        self.num_queued -= begun
        self.num_decoding += begun - self.num_decoding / self.DECODE_S * self.TICK_S

    def figures(self):
        ready = [at for at in self.ready_at if at <= self.now]
        if not ready:
            return []
        live = self.num_queued + self.num_decoding
        total = {"queued_tokens": self.num_queued * self.PROMPT, "num_live": live}
        return [replace(e, prefill_rate=self.PREFILL_RATE, max_rows=self.ROWS) for e in engines(len(ready), **total)]

    def scale(self, count):
        self.ready_at = self.ready_at[:count] + [self.now + self.START_S] * (count - len(self.ready_at))


def test_a_square_wave_has_at_most_one_reversal():
    policy, found = ScalingPolicy(1, 8, 2, 60), Engines(1)
    reversals = []
    for _ in range(3):
        history = []
        for tick in range(int(600 / Engines.TICK_S)):
            found.advance(9.0 if tick * Engines.TICK_S < 300 else 0.5)
            if tick % 4 == 0:
                history.append(len(found.ready_at))
                found.scale(policy.decide(found.figures(), history[-1], found.now))
        changes = [b > a for a, b in pairwise(history) if a != b]
        reversals.append(sum(a != b for a, b in pairwise(changes)))
        assert history[0] == history[-1] == 1
        assert max(history) >= 4
    assert max(reversals) == 1, reversals


def replica(name, figures, before=()):
    """As Serve has its reports: a series for each number."""
    values = [*before, report_of(figures)]
    return {key: {name: [SimpleNamespace(value=v[key]) for v in values if key in v]} for v in values for key in v}


def context(*replicas, target):
    series = {}
    for reports in replicas:
        for key, of in reports.items():
            series.setdefault(key, {}).update(of)
    running = [name for reports in replicas for name in reports["serves"]]
    return SimpleNamespace(raw_metrics=series, running_replicas=running, target_num_replicas=target)


def test_serves_policy_takes_the_last_reports():
    policy = ServePolicy(min_engines=0, max_engines=3, upscale_delay_s=0, downscale_delay_s=0, idle_s=5)
    busy = replace(IDLE, num_live=12, idle_s=0)
    assert policy(context(target=0)) == (0, {})
    assert policy(context(replica("a", busy), target=1))[0] == 2
    assert policy(context(replica("a", busy, [report_of(IDLE)]), replica("b", busy), target=2))[0] == 3
    assert policy(context(replica("a", IDLE), replica("b", None, [report_of(IDLE)]), target=2))[0] == 2
    assert policy(context(replica("a", IDLE), replica("b", None), target=2))[0] == 2
    assert policy(context(replica("a", IDLE), replica("b", IDLE), target=2))[0] == 0


def test_serve_can_pickle_the_policy_by_value():
    """The controller cannot import our packages."""
    cloudpickle.register_pickle_by_value(autoscaling)
    try:
        pickled = cloudpickle.dumps(ScalingPolicy)
    finally:
        cloudpickle.unregister_pickle_by_value(autoscaling)
    assert cloudpickle.loads(pickled)(1, 3).decide([IDLE], 2, 0.0) == 2
