"""A draft model's mirrors and its client: guesses are right after losses, delays and repeats, and no token is ever
wrong."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.assembly.engine import build_engine
from runtime.base.config import EngineConfig
from runtime.base.types import Request, SamplingParams
from runtime.speculation.choose_k import Speculation
from runtime.speculation.draft import CommitTokens, DraftRequests, DraftTokens, LocalWire, OpenStream
from runtime.speculation.draft_client import DraftClient
from tests.support.engine.draft_wires import BusyWire, SlowWire
from tests.support.engine.drafts import STEP_US, Clock, check_core, draft_core, info
from tests.support.engine.fake_runner import VOCAB, CheckedCore, FakeRunner, check_integrity, sequential
from tests.support.examples import examples


class PausingClient(DraftClient):
    """Makes no guesses until `paused_until`."""

    paused_until = 0.0

    @property
    def is_ready(self):
        return super().is_ready and self._clock() >= self.paused_until


class BadWire:
    """Loses, repeats and delays frames in both directions; can die, and restart with empty state."""

    def __init__(self, core, clock, seed, loss):
        self.core, self.clock, self.loss, self.dead, self.late = core, clock, loss, False, []
        self.rng = np.random.default_rng(seed)

    def send(self, told):
        if self.dead:
            raise OSError("gone")
        if self.rng.random() >= self.loss:
            for _ in range(1 + (self.rng.random() < self.loss)):
                self.core.take(None, told)

    def receive(self, timeout_s):
        if self.dead:
            raise OSError("gone")
        came = self.late
        self.late = []
        for _ in range(self.rng.integers(1, 4) if timeout_s <= 0 else 99):
            self.core.step()
        for chain in self.core.outbox.pop(None, ()):
            fate = self.rng.random()
            if fate < self.loss:
                continue
            (self.late if fate < 2 * self.loss else came).append(chain)
        self.clock.now += 0.0001 if came else timeout_s
        return came or None


def test_draft_tokens_continue_confirmed_tokens():
    core = draft_core(ahead=2)
    request = Request("r", [1, 2, 3, 4, 5], 5, SamplingParams(max_tokens=40, ignore_eos=True), seed=0)
    right, _ = sequential(request, 64)
    core.take("engine", DraftRequests(opened=[OpenStream(7, request, 3)]))
    while core.step():
        pass
    assert core.outbox.pop("engine") == [DraftTokens(7, 5, right[:3]), DraftTokens(7, 5, right[:5])]
    core.take("engine", DraftRequests(committed=[CommitTokens(7, 5, right[:4], 3)]))
    while core.step():
        pass
    assert core.outbox.pop("engine")[-1] == DraftTokens(7, 9, right[4:9])
    wrong = (right[5] + 1) % VOCAB  # as if the target had sampled another token
    core.take("engine", DraftRequests(committed=[CommitTokens(7, 5, [*right[:5], wrong], 2)]))
    while core.step():
        pass
    rest, _ = sequential(Request("r", [*request.token_ids, *right[:5], wrong], 11, request.params, seed=0), 64)
    (first, _) = core.outbox.pop("engine")
    assert first == DraftTokens(7, 11, rest[:2]), "it went back and took the other way"
    core.take("engine", DraftRequests(committed=[CommitTokens(7, 9, [right[4], wrong], 2)]))
    assert core.outbox.pop("engine") == [DraftTokens(7, 11, rest[:4])], "a repeated commit changes nothing"
    core.take("engine", DraftRequests(committed=[CommitTokens(7, 14, [1], 2)]))
    assert core.outbox.pop("engine") == [DraftTokens(7, 11, [])], "a gap is told"
    core.take("engine", DraftRequests(committed=[CommitTokens(8, 14, [1], 2)]))
    assert core.outbox.pop("engine") == [DraftTokens(8, 0, [])], "and so is an unknown stream"
    core.take("engine", DraftRequests(closed=[7, 9]))
    assert not core.scheduler.requests
    check_core(core)


def test_only_final_tokens_are_hashed():
    """A mirror's own guesses fill blocks that are rewritten later, so no other mirror may find them."""
    core = draft_core()
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    first = Request("a", [1, 2, 3, 4, 5], 5, params, seed=0)
    guessed, _ = sequential(first, 64)
    core.take(1, DraftRequests(opened=[OpenStream(1, first, 8)]))
    while core.step():
        pass
    core.take(1, DraftRequests(committed=[CommitTokens(1, 5, [(guessed[0] + 1) % VOCAB] * 6, 8)]))
    while core.step():
        pass
    core.outbox.clear()
    second = Request("b", [*first.token_ids, *guessed[:8]], 13, params, seed=0)
    core.take(1, DraftRequests(opened=[OpenStream(2, second, 4)]))
    while core.step():
        pass
    assert core.outbox[1] == [DraftTokens(2, 13, guessed[8:12])]
    assert core.scheduler.stats.prompt_tokens_cached == 4, "what was final in the first"


params = st.builds(
    SamplingParams,
    max_tokens=st.integers(1, 30),
    ignore_eos=st.booleans(),
    stop_token_ids=st.sampled_from([(), (), (3,)]),
)
prompts = st.lists(st.integers(1, VOCAB - 1), min_size=1, max_size=24)


@settings(max_examples=examples(150))
@given(
    requests=st.lists(st.tuples(prompts, params), min_size=1, max_size=7),
    share=st.sampled_from([0.0, 0.2, 0.9]),
    loss=st.sampled_from([0.0, 0.0, 0.1, 0.4]),
    fixed=st.sampled_from([None, 1, 3, 8]),
    ahead=st.sampled_from([0, 1, 4, 9]),
    blocks=st.integers(18, 60),
    draft_blocks=st.integers(10, 40),
    depth=st.sampled_from([1, 2]),
    kills=st.lists(st.integers(1, 60), max_size=3),
    seed=st.integers(0, 5),
)
def test_tokens_are_right_under_any_events(
    requests, share, loss, fixed, ahead, blocks, draft_blocks, depth, kills, seed
):
    config = EngineConfig(block_size=4, max_num_seqs=5, max_num_batched_tokens=16, pipeline_depth=depth)
    clock, target = Clock(), info(blocks=blocks)
    client = DraftClient(VOCAB, clock)
    core = CheckedCore(config, target, FakeRunner(config, target), Speculation(client, fixed, STEP_US, 0.1))
    draft = draft_core(share, ahead, blocks=draft_blocks, seqs=3)
    wire = BadWire(draft, clock, seed, loss)
    client.attach(wire, STEP_US)
    want, got, at = {}, {}, 0
    for i, (prompt, p) in enumerate(requests):
        request = Request(str(i), prompt, len(prompt), p, seed=i)
        if len(prompt) >= core.scheduler.max_len:
            continue
        want[str(i)], _ = sequential(request, core.scheduler.max_len)
        core.add(request)
    while core.has_work:
        output = core.step()
        check_integrity(core)
        check_core(draft)
        at += 1
        clock.now += 0.001
        if at in kills:
            wire.dead = True
        elif wire.dead and at - 5 in kills:
            draft = draft_core(share, ahead, blocks=draft_blocks, seqs=3)
            wire = BadWire(draft, clock, seed + at, loss)
            client.attach(wire, STEP_US)
        assert at < 4000, "the engine makes no progress"
        for state, token in zip(output.states, output.token_ids, strict=True) if output else ():
            got.setdefault(state.request.request_id, []).append(token)
    assert got == want
    if not kills and not loss:
        client.poll()
        assert not draft._streams, "all mirrors were closed"


@pytest.mark.parametrize("ahead", [0, 1, 9])
def test_a_perfect_draft_is_always_right(ahead):
    """Equal models: every guess is accepted, over rewinds at the ends of chains, blocks and the context."""
    config = EngineConfig(block_size=4, max_num_seqs=5, max_num_batched_tokens=16)
    clock, target = Clock(), info()
    client = DraftClient(VOCAB, clock)
    core = build_engine(config, target, FakeRunner(config, target), Speculation(client, 4, STEP_US, 0.0))
    client.attach(LocalWire(draft_core(ahead=ahead)), STEP_US)
    for i in range(4):
        core.add(Request(str(i), [1 + i] * (5 + i), 5 + i, SamplingParams(max_tokens=40, ignore_eos=True), seed=i))
    done = []
    while core.has_work:
        if (output := core.step()) is not None:
            done += [state for state, _ in output.finished]
    assert core.scheduler.stats.accepted_draft_tokens == core.scheduler.stats.draft_tokens > 100
    assert core.scheduler.stats.steps < 40
    assert client.num_late == 0


@pytest.mark.parametrize("ahead", [1, 6])
def test_a_miss_costs_no_later_guess(ahead):
    """After a wrong guess the draft is right again as often as before: it went back to the right place."""
    config = EngineConfig(block_size=4, max_num_seqs=5, max_num_batched_tokens=16)
    clock, target = Clock(), info(max_len=2000, blocks=4000)
    client = DraftClient(VOCAB, clock)
    core = build_engine(config, target, FakeRunner(config, target), Speculation(client, 3, STEP_US, 0.0))
    client.attach(LocalWire(draft_core(0.3, ahead, max_len=2000, blocks=4000)), STEP_US)
    for i in range(4):
        core.add(Request(str(i), [1 + i] * (5 + i), 5 + i, SamplingParams(max_tokens=900, ignore_eos=True), seed=i))
    while core.has_work:
        core.step()
    s = core.scheduler
    accepted = s.stats.accepted_by_position
    rates = [a / b for a, b in zip(accepted[:3], (s.stats.drafts, *accepted), strict=False)]
    assert rates == pytest.approx([0.7, 0.7, 0.7], abs=0.05)


def test_a_draft_runs_ahead_while_there_is_time():
    """A commit that finds it busy makes it stop earlier; a commit that finds it idle makes it stop later."""
    core, tokens = draft_core(ahead=8, max_len=4000, blocks=2000), [1, 2, 3]
    request = Request("", tokens, 3, SamplingParams(max_tokens=3000, ignore_eos=True), seed=0)
    core.take(None, DraftRequests(opened=[OpenStream(1, request, 3)]))

    def guesses_after(num_pieces):
        """The number of guesses, and whether no work was left, if a commit arrives after `num_pieces` pieces of
        work."""
        while not (said := core.outbox.pop(None, None)):
            core.step()
        known = [*tokens, *said[-1].token_ids[:3], 5]
        is_idle = not [core.step() for _ in range(num_pieces)][-1]
        num = len(core._streams[None, 1].tokens) - len(tokens)
        core.outbox.clear()
        core.take(None, DraftRequests(committed=[CommitTokens(1, len(tokens), known[len(tokens) :], 3)]))
        tokens[:] = known
        return num, is_idle

    assert guesses_after(99) == (3 + 8, True)
    assert guesses_after(3) == (3 + 6, False)
    found = [guesses_after(3) for _ in range(100)][20:]
    assert {num for num, _ in found} <= {3 + 3, 3 + 4, 3 + 5}
    assert sum(is_idle for _, is_idle in found) > 60
    assert [guesses_after(99)[0] for _ in range(100)][-1] == 3 + 8


def test_no_step_waits_for_a_draft_that_is_far_behind():
    """It catches up while requests decode without it, and the time that this takes does not count for other replies."""
    clock = Clock()
    config = EngineConfig(block_size=4, max_num_seqs=5, max_num_batched_tokens=16)
    target = info(max_len=400, blocks=200)
    client = PausingClient(VOCAB, clock)
    core = build_engine(config, target, FakeRunner(config, target), Speculation(client, 3, STEP_US, 0.0))
    wire = SlowWire(draft_core(max_len=400, blocks=200), clock, lambda behind: 0.005 if behind > 8 else 0.0001)
    client.attach(wire, STEP_US)
    core.add(Request("0", [1, 2, 3], 3, SamplingParams(max_tokens=300, ignore_eos=True), seed=0))
    s = core.scheduler

    def run_until(is_so):
        while not is_so():
            core.step()
            clock.now += 0.001

    run_until(lambda: s.stats.drafts > 3)
    client.paused_until = clock.now + 0.02
    run_until(lambda: clock.now >= client.paused_until)
    overhead, began, steps, drafts = client._overhead_us, clock.now, core.scheduler.stats.steps, s.stats.drafts
    run_until(lambda: s.stats.drafts > drafts)
    assert clock.now - began == pytest.approx(0.001 * (core.scheduler.stats.steps - steps), abs=0.0021)
    assert 5 <= core.scheduler.stats.steps - steps <= 12
    assert abs(client._overhead_us - overhead) < 20
    run_until(lambda: s.stats.drafts > drafts + 20)
    assert client.num_late == 0
    assert s.stats.accepted_draft_tokens > 60


def test_a_pause_of_the_process_is_no_overhead():
    clock = Clock()
    config = info(max_len=400, blocks=200)
    client = DraftClient(VOCAB, clock)
    core = build_engine(
        EngineConfig(block_size=4), config, FakeRunner(EngineConfig(block_size=4), config),
        Speculation(client, 3, STEP_US, 0.0),
    )  # fmt: skip
    wire = SlowWire(draft_core(max_len=400, blocks=200), clock, lambda behind: 0.001)
    client.attach(wire, STEP_US)
    core.add(Request("0", [1, 2, 3], 3, SamplingParams(max_tokens=100, ignore_eos=True), seed=0))
    found, paused = [], []
    receive = wire.receive

    def stopped(timeout_s):
        chains = receive(timeout_s)
        if chains and timeout_s and len(found) > 5 and not paused:
            clock.now += 60.0
            paused.append(len(found))
        return chains

    wire.receive = stopped
    while core.has_work:
        core.step()
        clock.now += 0.001
        found.append(client._overhead_us)
    assert paused
    assert max(found) < 3000


def test_a_draft_that_is_hardly_faster_catches_up():
    """While it works through its backlog, new tokens arrive; the engine waits for those too."""
    clock = Clock()
    config = EngineConfig(block_size=4, max_num_seqs=5, max_num_batched_tokens=16)
    target = info(max_len=400, blocks=200)
    times = ((1, 1000.0), (64, 64_000.0))
    client = PausingClient(VOCAB, clock)
    core = build_engine(config, target, FakeRunner(config, target), Speculation(client, 3, times, 0.0))
    wire = SlowWire(draft_core(max_len=400, blocks=200), clock, lambda behind: 0.001 * behind * (behind > 3))
    client.attach(wire, times)  # a token takes the draft and the target equally long
    core.add(Request("0", [1, 2, 3], 3, SamplingParams(max_tokens=300, ignore_eos=True), seed=0))
    while core.scheduler.stats.drafts < 4:
        core.step()
        clock.now += 0.001
    client.paused_until, before = clock.now + 0.03, core.scheduler.stats.accepted_draft_tokens
    while core.has_work:
        core.step()
        clock.now += 0.001
    assert core.scheduler.stats.accepted_draft_tokens > before + 100


def test_a_draft_gets_no_request_before_its_reply():
    """Otherwise a draft that is slower than the interval of requests would restart with each."""
    clock = Clock()
    config = EngineConfig(block_size=4, max_num_seqs=5, max_num_batched_tokens=16)
    target = info(max_len=400, blocks=200)
    client, times = DraftClient(VOCAB, clock), ((1, 50_000.0), (64, 60_000.0))
    core = build_engine(config, target, FakeRunner(config, target), Speculation(client, 3, times, 0.0))
    client.attach(BusyWire(draft_core(max_len=400, blocks=200), clock, 0.4), times)
    core.add(Request("0", [1, 2, 3], 3, SamplingParams(max_tokens=300, ignore_eos=True), seed=0))
    while core.has_work:
        core.step()
        clock.now += 0.05
    assert core.scheduler.stats.accepted_draft_tokens > 10
    assert core.extras[Speculation].acceptance[0].rates[0] > 0.6, "no answer is not a wrong one"


def test_a_silent_draft_costs_one_wait():
    """Hung: the engine waits for the first reply, then for none, because the draft falls behind. At last it is given
    up."""
    config = EngineConfig(block_size=4, max_num_seqs=5, max_num_batched_tokens=16)
    clock, target = Clock(), info(max_len=60000, blocks=20000)
    client = DraftClient(VOCAB, clock)
    core = build_engine(config, target, FakeRunner(config, target), Speculation(client, 3, STEP_US, 0.0))
    wire = BadWire(draft_core(max_len=60000, blocks=20000), clock, 0, 0.0)
    client.attach(wire, STEP_US)
    core.add(Request("0", [1, 2, 3], 3, SamplingParams(max_tokens=50000, ignore_eos=True), seed=0))
    for _ in range(30):
        core.step()
        clock.now += 0.001
    assert core.scheduler.stats.accepted_draft_tokens > 20
    wire.loss = 1.1
    waits = []
    for _ in range(2000):
        late, before = client.num_late, clock.now
        steps = core.scheduler.stats.steps
        while core.scheduler.stats.steps == steps:
            core.step()
        if client.num_late > late:
            waits.append(clock.now - before)
        clock.now += 0.01
    assert client.is_hung
    assert len(waits) == 1
    assert waits[0] < 0.003
    core.abort("0")
    wire.loss = 0.0
    client.poll()
    wire.loss, client.is_hung, client._silent_since = 1.1, False, None
    for i in range(1, 60):  # no request lives long enough for a wait
        core.add(Request(str(i), [1, 2, 3], 3, SamplingParams(max_tokens=60, ignore_eos=True), seed=i))
        while core.has_work:
            core.step()
            clock.now += 0.005
    assert client.is_hung, "requests that are only opened are not answered either"
    wire.loss = 0.0
    core.add(Request("last", [1, 2, 3], 3, SamplingParams(max_tokens=50000, ignore_eos=True), seed=0))
    for _ in range(600):
        core.step()
        clock.now += 0.01
    assert not client.is_hung


def test_draft_times_of_a_busy_machine_are_corrected():
    config = EngineConfig(block_size=4, max_num_seqs=5, max_num_batched_tokens=16)
    clock, target = Clock(), info(max_len=4000, blocks=2000)
    client, times = DraftClient(VOCAB, clock), ((1, 500_000.0), (64, 500_000.0))
    core = build_engine(config, target, FakeRunner(config, target), Speculation(client, 3, times, 0.0))
    wire = SlowWire(draft_core(max_len=4000, blocks=2000), clock, lambda behind: 0.001)
    client.attach(wire, times)
    core.add(Request("0", [1, 2, 3], 3, SamplingParams(max_tokens=3000, ignore_eos=True), seed=0))
    while core.scheduler.stats.drafts < 100:
        core.step()
        clock.now += 0.01
    wire.seconds_of, before = lambda behind: 1e9, clock.now
    while not client.num_late:
        core.step()
    assert clock.now - before < 0.1


def test_a_draft_is_busy_until_its_reply():
    config = EngineConfig(block_size=4, max_num_seqs=5, max_num_batched_tokens=16)
    clock, target = Clock(), info(max_len=400, blocks=200)
    client, busy = DraftClient(VOCAB, clock), []
    core = build_engine(config, target, FakeRunner(config, target), Speculation(client, 3, STEP_US, 0.0))
    client.attach(SlowWire(draft_core(max_len=400, blocks=200), clock, lambda behind: 0.1), STEP_US)
    core.add(Request("0", [1, 2, 3], 3, SamplingParams(max_tokens=300, ignore_eos=True), seed=0))
    for _ in range(20):
        core.step()
        busy.append(client.is_busy())
        clock.now += 0.02
    assert busy.index(True) < 3
    assert busy.index(False, 3) in range(5, 10)
    client.attach(SlowWire(draft_core(max_len=4, blocks=200), clock, lambda behind: 0.1), STEP_US)
    for _ in range(50):
        core.step()
        clock.now += 0.02
    assert not client.is_busy(), "a request that is too long for the draft is never answered"


def test_a_request_lost_by_the_draft_is_sent_again():
    config = EngineConfig(block_size=4, max_num_seqs=5, max_num_batched_tokens=16)
    clock, target = Clock(), info(max_len=400, blocks=200)
    client, draft = DraftClient(VOCAB, clock), draft_core(max_len=400, blocks=200)
    core = build_engine(config, target, FakeRunner(config, target), Speculation(client, 3, STEP_US, 0.0))
    client.attach(BadWire(draft, clock, 0, 0.0), STEP_US)
    core.add(Request("0", [1, 2, 3], 3, SamplingParams(max_tokens=300, ignore_eos=True), seed=0))
    for _ in range(20):
        core.step()
    before = core.scheduler.stats.accepted_draft_tokens
    draft._close(None, 1)
    for _ in range(20):
        core.step()
    assert core.scheduler.stats.accepted_draft_tokens > before + 10
    assert client.num_late == 0


def test_a_draft_that_stops_reading_is_hung():
    class Full(LocalWire):
        def send(self, told):
            raise TimeoutError("it does not read")

    client, config = DraftClient(VOCAB, Clock()), EngineConfig(block_size=4, max_num_seqs=5, max_num_batched_tokens=16)
    core = build_engine(config, info(), FakeRunner(config, info()), Speculation(client, 3, STEP_US, 0.0))
    client.attach(Full(draft_core()), STEP_US)
    core.add(Request("0", [1, 2, 3], 3, SamplingParams(max_tokens=20, ignore_eos=True), seed=0))
    while core.has_work:
        core.step()
    assert client.is_hung
    client.attach(LocalWire(draft_core()), STEP_US)
    assert not client.is_hung
