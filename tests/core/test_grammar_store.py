"""Grammars on a connection: a message never names a text that its receiver lacks, and both ends stay small."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.runners.plan_wire import PlanReader, PlanWriter
from runtime.assembly.engine import build_engine
from runtime.base.config import EngineConfig
from runtime.base.model_info import ModelInfo
from runtime.base.types import CallboardError, Grammar, Request, SamplingParams
from runtime.core.plan import MAX_NEW_BYTES
from runtime.core.request_state import RequestState
from runtime.features.grammar_store import GrammarSender, GrammarStore, by_key, request_by_key
from runtime.policy.queue_sizes import QueueSizes
from runtime.speculation.draft import DraftRequests, OpenStream, requests_by_key, whole_requests
from tests.support.engine.fake_runner import EOS, VOCAB, FakeRunner, sequential

MAX_BYTES = 1000
GRAMMARS = [Grammar(f"key {i}", "x" * (40 * i % 700), "é" * (i % 3)) for i in range(30)]
INFO = ModelInfo("f", VOCAB, 64, (EOS,), 4000, 4, "none", "none")


def request(name: str, grammar: Grammar | None, prompt: tuple[int, ...] = (1, 2, 3), **fields) -> Request:
    params = SamplingParams(max_tokens=4, ignore_eos=True, grammar=grammar, **fields)
    return Request(name, list(prompt), len(prompt), params)


class Hop:
    """Both ends of one connection, with messages that survive the wire."""

    def __init__(self) -> None:
        self.sender, self.store = GrammarSender(MAX_BYTES), GrammarStore()

    def send(self, grammars: list[Grammar]) -> None:
        update = self.sender.update(grammars)
        if update is not None:
            self.store.apply(msgspec.msgpack.decode(msgspec.msgpack.encode(update), type=type(update)))
        for grammar in grammars:
            assert self.store.whole(by_key(SamplingParams(grammar=grammar))).grammar == grammar
        held = sum(grammar.num_bytes for grammar in self.store.grammars.values())
        assert held == self.sender.num_bytes
        named = {grammar.key: grammar.num_bytes for grammar in grammars}
        assert held <= max(MAX_BYTES, sum(named.values()))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.sampled_from(GRAMMARS), min_size=1, max_size=6) | st.just("restart"), max_size=60))
def test_the_store_has_every_grammar_of_a_message(events):
    """Through sends, evictions, links that reconnect, and engines or runners that restart."""
    engines = [Hop(), Hop()]
    for number, event in enumerate(events):
        if isinstance(event, str):
            engines[number % 2] = Hop()  # either end is new: so is the connection
        else:
            for hop in engines if number % 3 == 0 else engines[:1]:  # a stream that moves names its grammar again
                hop.send(event)


def test_each_text_is_sent_once_while_it_is_kept():
    sender = GrammarSender(MAX_BYTES)
    small = [Grammar(str(i), "x" * 100, "") for i in range(12)]
    assert sender.update(small[:9]).added == small[:9]
    assert sender.update(small[:9]) is None
    assert sender.update(small[:1]) is None  # the latest one now
    update = sender.update(small[9:])
    assert (update.added, update.removed) == (small[9:], ["1", "2"])
    assert sender.update(small[1:2]).removed == ["3"]


def test_unknown_key_is_refused():
    with pytest.raises(CallboardError, match="grammar 'key 3', which was not sent"):
        GrammarStore().whole(by_key(SamplingParams(grammar=GRAMMARS[3])))


def test_draft_gets_each_text_once():
    sender, store = GrammarSender(), GrammarStore()
    told = DraftRequests(opened=[OpenStream(i, request(str(i), GRAMMARS[9 + i % 2]), 3) for i in range(6)])
    frames = [msgspec.msgpack.encode(requests_by_key(told, sender)) for _ in range(2)]
    assert len(frames[1]) < len(frames[0]) - GRAMMARS[9].num_bytes
    for frame in frames:
        assert whole_requests(msgspec.msgpack.decode(frame, type=DraftRequests), store).opened == told.opened


# ---- plans -----------------------------------------------------------------------------------------------------------


class NotingReader(PlanReader):
    """Keeps the plans that it has read."""

    def __init__(self) -> None:
        super().__init__()
        self.plans, self.num_bytes = [], []

    def decode(self, frame):
        self.num_bytes.append(len(frame))
        self.plans.append(super().decode(frame))
        return self.plans[-1]

    @property
    def grammars(self) -> list[Grammar]:
        return [new.params.grammar for plan in self.plans for new in plan.new]


def served(grammars: list[Grammar], num_losses: int = 0) -> list[NotingReader]:
    """The readers of runners that have served a request for each grammar; each lives until the next one was lost."""
    config = EngineConfig(block_size=4, max_num_seqs=128, max_num_batched_tokens=1024)
    readers: list[NotingReader] = []

    def start() -> FakeRunner:
        runner = FakeRunner(config, INFO)
        readers.append(NotingReader())
        runner.reader = readers[-1]
        return runner

    core = build_engine(config, INFO, start())
    requests = {str(i): request(str(i), grammar) for i, grammar in enumerate(grammars)}
    for each in requests.values():
        core.add(each)
    got = {name: [] for name in requests}
    for _ in range(400):
        if not core.has_work:
            break
        if num_losses and core.scheduler.stats.steps == 2:
            num_losses -= 1
            core.lose()
            core.recover(start())
        output = core.step()
        for state, token in zip(output.states, output.token_ids, strict=True) if output else ():
            got[state.request.request_id].append(token)
    assert got == {name: sequential(each, 64)[0] for name, each in requests.items()}
    return readers


def test_new_slots_of_large_grammars_stay_far_below_a_frame():
    """128 choices with a grammar of 256 KiB each: one plan of them all would be 33 MB."""
    grammars = [Grammar(f"{i}", f"{i:03}" + "x" * (256 << 10), "") for i in range(128)]
    (reader,) = served(grammars)
    assert max(reader.num_bytes) < MAX_NEW_BYTES + (1 << 20)
    assert reader.grammars == grammars
    assert 3 <= sum(len(plan.new) > 0 for plan in reader.plans) <= 6


def test_choices_share_the_text_of_their_grammar():
    grammar = Grammar("one", "x" * (256 << 10), "")
    for reader in served([grammar] * 128, num_losses=1):  # fresh runners get it again
        assert sum(reader.num_bytes) < 1.5 * grammar.num_bytes
        assert reader.grammars == [grammar] * 128
        assert len(reader.plans[0].new) == 128


def test_a_reader_of_only_a_later_frame_refuses_it():
    config = EngineConfig(block_size=4)
    core, writer = build_engine(config, INFO, FakeRunner(config, INFO)), PlanWriter()
    for name in "ab":
        core.add(request(name, GRAMMARS[5]))
        frame = writer.encode(core.scheduler.schedule().plan)
    with pytest.raises(CallboardError, match="not sent before"):
        PlanReader().decode(frame)


# ---- the queue -------------------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 4)), max_size=40))
def test_queue_counts_bytes_and_each_grammar_once(events):
    queue, states = QueueSizes(), {}
    for number, (enters, i) in enumerate(events):
        if enters or not states:
            each = request(str(number), GRAMMARS[3 * i] if i else None, tuple(range(1, 2 + i)), stop_token_ids=(1,) * i)
            state = RequestState(each, list(each.token_ids), 64, frozenset(), (0, 0, number))
            queue.on_queue(state)
            states[number] = state
        else:
            queue.on_dequeue(states.pop(min(states)))
    grammars = {s.params.grammar.key: s.params.grammar.num_bytes for s in states.values() if s.params.grammar}
    own = sum(4 * len(s.tokens) + 5 * len(s.params.stop_token_ids) for s in states.values())
    assert queue.num_bytes(sum(len(s.tokens) for s in states.values())) == own + sum(grammars.values())
    assert all(queue.has_grammar(grammar.key) == (grammar.key in grammars) for grammar in GRAMMARS)


def test_a_request_travels_by_the_key_of_its_grammar():
    whole = request("r", GRAMMARS[7])
    sent = request_by_key(whole)
    assert sent.params.grammar == Grammar(GRAMMARS[7].key, "", "")
    assert request_by_key(free := request("free", None)) is free
