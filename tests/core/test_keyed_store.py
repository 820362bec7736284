"""Grammars and images on a connection: a message never names what its receiver lacks, and both ends stay small."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.runners.plan_wire import PlanReader, PlanWriter
from runtime.assembly.engine import build_engine
from runtime.base.config import EngineConfig
from runtime.base.images import Image, ImageSpan
from runtime.base.model_info import ModelInfo
from runtime.base.types import CallboardError, Grammar, Request, SamplingParams
from runtime.core.plan import EMPTY, MAX_NEW_BYTES, Encoding, NewSlot, StepPlan
from runtime.core.request_state import RequestState
from runtime.features.keyed_store import MAX_UPDATE_BYTES, KeyedSender, KeyedStore, KeyedUpdate
from runtime.policy.queue_sizes import KeyedBytes, QueueSizes, RequestSizes
from runtime.speculation.draft import DraftRequests
from tests.support.engine.fake_runner import EOS, VOCAB, FakeRunner, sequential

LIMITS = {Grammar: 1000, Image: 5000}
GRAMMARS = [Grammar(f"key {i}", "x" * (40 * i % 700), "é" * (i % 3)) for i in range(30)]
IMAGES = [Image(bytes([i]) * 16, ((i, 100),), bytes([i]) * (300 * i)) for i in range(1, 12)]
INFO = ModelInfo("f", VOCAB, 64, (EOS,), 4000, 4, "none", "none")


def request(name: str, grammar: Grammar | None, prompt: tuple[int, ...] = (1, 2, 3), images=(), **fields) -> Request:
    params = SamplingParams(max_tokens=4, ignore_eos=True, grammar=grammar, **fields)
    spans = tuple(ImageSpan(i, 1, image) for i, image in enumerate(images))
    return Request(name, list(prompt), len(prompt), params, images=spans)


def whole(update: bytes) -> KeyedUpdate:
    return msgspec.msgpack.decode(update, type=KeyedUpdate)


class Hop:
    """Both ends of one connection, with messages that survive the wire."""

    def __init__(self) -> None:
        self.sender, self.store = KeyedSender(LIMITS), KeyedStore()

    def send(self, values: list[Grammar | Image]) -> None:
        for frame in self.sender.frames(values):
            assert self.store.take(frame)
        for value in values:
            assert self.store.whole(value.named) == value
        for kind, limit in LIMITS.items():
            held = sum(value.num_bytes for value in self.store.values.values() if isinstance(value, kind))
            assert held == self.sender.num_bytes[kind]
            named = {value.key: value.num_bytes for value in values if isinstance(value, kind)}
            assert held <= max(limit, sum(named.values()))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.sampled_from([*GRAMMARS, *IMAGES]), min_size=1, max_size=6) | st.just("restart")))
def test_the_store_has_every_value_of_a_message(events):
    """Through sends, evictions, links that reconnect, and engines or runners that restart."""
    engines = [Hop(), Hop()]
    for number, event in enumerate(events):
        if isinstance(event, str):
            engines[number % 2] = Hop()  # either end is new: so is the connection
        else:
            for hop in engines if number % 3 == 0 else engines[:1]:  # a stream that moves names its grammar again
                hop.send(event)


def test_each_text_is_sent_once_while_it_is_kept():
    sender = KeyedSender(LIMITS)
    small = [Grammar(str(i), "x" * 100, "") for i in range(12)]
    assert whole(*sender.frames(small[:9])).added == small[:9]
    assert sender.frames(small[:9]) == []
    assert sender.frames(small[:1]) == []  # the latest one now
    update = whole(*sender.frames(small[9:]))
    assert (update.added, update.removed) == (small[9:], ["1", "2"])
    assert whole(*sender.frames(small[1:2])).removed == ["3"]
    assert whole(*sender.frames(IMAGES[:3])).removed == [], "kinds have limits of their own"


def test_a_text_that_cannot_be_sent_leaves_both_ends_equal():
    sender = KeyedSender(LIMITS)
    for bad in (Grammar("bad", "\ud800", ""), Grammar("bad", "", "", ("\ud800",))):
        with pytest.raises(UnicodeError):
            sender.frames([*IMAGES[:2], bad])
    assert whole(*sender.frames(IMAGES[:2])).added == IMAGES[:2]


def test_large_images_have_frames_of_their_own():
    images = [Image(bytes([i]) * 16, ((2048, 2048),), bytes(12 << 20)) for i in range(3)]
    small = [Image(bytes([100 + i]) * 16, ((8, 8),), bytes(192)) for i in range(3)]
    frames = KeyedSender().frames([*small, *images])
    assert [len(whole(frame).added) for frame in frames] == [4, 1, 1]
    assert max(map(len, frames)) < MAX_UPDATE_BYTES


@pytest.mark.parametrize("value", [GRAMMARS[3], IMAGES[3]])
def test_unknown_key_is_refused(value):
    with pytest.raises(CallboardError, match=f"{type(value).__name__.lower()} '{value.key}', which was not sent"):
        KeyedStore().whole(value.named)


def test_other_messages_are_no_updates():
    store = KeyedStore()
    assert not any(map(store.take, (b"", b"\x93", msgspec.msgpack.encode(DraftRequests()))))


def test_a_request_travels_by_keys():
    sent = request("r", GRAMMARS[7], images=IMAGES[:2])
    assert sent.named == request("r", GRAMMARS[7].named, images=[image.named for image in IMAGES[:2]])
    assert sent.named.with_keyed(lambda value: sent.keyed[value.key]) == sent
    assert len(msgspec.msgpack.encode(sent.named)) < 1500
    assert (free := request("free", None)).named is free


# ---- plans -----------------------------------------------------------------------------------------------------------


class NotingReader(PlanReader):
    """Keeps the plans that it has read."""

    def __init__(self) -> None:
        super().__init__()
        self.plans, self.num_bytes = [], []

    def decode(self, frame):
        self.num_bytes.append(len(frame))
        if (plan := super().decode(frame)) is not None:
            self.plans.append(plan)
        return plan

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
        *_, frame = writer.frames(core.scheduler.schedule().plan)
    with pytest.raises(CallboardError, match="not sent before"):
        PlanReader().decode(frame)


def test_a_plan_names_images_that_were_sent():
    plans = [
        StepPlan(
            i, new=[NewSlot(0, EMPTY, 1, 0, SamplingParams(grammar=GRAMMARS[i]))], encodings=[Encoding(image, i, 1)]
        )
        for i, image in enumerate([*IMAGES, IMAGES[0]], 1)
    ]
    writer, reader = PlanWriter(), PlanReader()
    for plan in plans:
        *updates, frame = writer.frames(plan)
        assert [reader.decode(update) for update in updates] == [None] * len(updates)
        assert len(frame) < 600
        got = reader.decode(frame)
        assert (got.encodings, got.new[0].params) == (plan.encodings, plan.new[0].params)
    assert len(whole(*updates).added) == 1, "the first image is still there, the grammar is new"
    with pytest.raises(CallboardError, match="grammar 'key 12', which was not sent"):
        PlanReader().decode(frame)


# ---- the queue -------------------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 4)), max_size=40))
def test_queue_counts_bytes_and_each_value_once(events):
    queue, states = QueueSizes(), {}
    for number, (enters, i) in enumerate(events):
        if enters or not states:
            grammar, images = GRAMMARS[3 * i] if i else None, IMAGES[i : 2 * i]
            each = request(str(number), grammar, tuple(range(1, 2 + i)), images, stop_token_ids=(1,) * i)
            state = RequestState(each, list(each.token_ids), 64, frozenset(), (0, 0, number))
            queue.on_queue(state)
            states[number] = state
        else:
            queue.on_dequeue(states.pop(min(states)))
    values = {key: value.num_bytes for s in states.values() for key, value in s.request.keyed.items()}
    own = sum(4 * len(s.tokens) + 5 * len(s.params.stop_token_ids) for s in states.values())
    assert queue.num_bytes(sum(len(s.tokens) for s in states.values())) == own + sum(values.values())
    for image in IMAGES:
        added = queue.keyed.added_by(request("r", None, images=[image]))
        assert added == 12 + (0 if image.key in values else image.num_bytes)


def test_sizes_of_several_queues_share_their_images():
    keyed = KeyedBytes()
    queues, one = [RequestSizes(keyed) for _ in range(2)], request("r", None, images=IMAGES[:3])
    for queue in queues:
        queue.add(one, 1)
    assert keyed.total == sum(image.num_bytes for image in IMAGES[:3])
    queues[0].add(one, -1)
    assert (queues[0].own_bytes, queues[1].own_bytes, keyed.added_by(one)) == (0, 12, 12)
    queues[1].add(one, -1)
    assert (keyed.total, keyed.added_by(one)) == (0, 12 + sum(image.num_bytes for image in IMAGES[:3]))
