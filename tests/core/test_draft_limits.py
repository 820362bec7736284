"""Requests that are too long for a draft, or for one frame to a draft."""

from runtime.assembly.engine import build_engine
from runtime.base.config import EngineConfig
from runtime.base.types import Request, SamplingParams
from runtime.speculation.choose_k import Speculation
from runtime.speculation.draft import CommitTokens, DraftRequests, DraftTokens, LocalWire, OpenStream
from runtime.speculation.draft_client import DraftClient
from tests.support.engine.drafts import STEP_US, Clock, check_core, draft_core, info
from tests.support.engine.fake_runner import VOCAB, FakeRunner


def test_the_mirror_ends_at_the_drafts_context():
    """This holds too for one that waits for a slot, of an engine with a longer context."""
    core = draft_core(seqs=1, max_len=64)
    requests = [Request(str(i), [1, 2, i], 3, SamplingParams(max_tokens=200, ignore_eos=True), seed=0) for i in (1, 2)]
    core.take("engine", DraftRequests(opened=[OpenStream(i, request, 2) for i, request in enumerate(requests)]))
    while core.step():
        pass
    core.outbox.clear()
    core.take("engine", DraftRequests(committed=[CommitTokens(1, 3, [7] * 61, 2)]))
    assert core.outbox["engine"] == [DraftTokens(1, 0, [])]
    core.take("engine", DraftRequests(closed=[0]))
    assert not core.step(), "no row of 64 tokens and another"
    longer = Request("r", [*requests[1].token_ids, *[7] * 62], 3, requests[1].params, seed=0)
    core.take("engine", DraftRequests(opened=[OpenStream(2, longer, 2)]))
    assert not core.step()
    check_core(core)


def test_long_prompts_are_opened_over_several_steps(monkeypatch):
    """All choices of one prompt are admitted at once; one step that opened them all would be long."""
    monkeypatch.setattr("runtime.speculation.draft_client._MOST_OPENED", 90)
    config = EngineConfig(block_size=4, max_num_seqs=8, max_num_batched_tokens=64)
    target, sizes = info(max_len=400, blocks=400), []
    client = DraftClient(VOCAB, Clock())
    core = build_engine(config, target, FakeRunner(config, target), Speculation(client, 3, STEP_US, 0.0))
    wire = LocalWire(draft_core(max_len=400, blocks=400, seqs=8))
    take = wire.send
    wire.send = lambda told: (sizes.append([len(opened.request.token_ids) for opened in told.opened]), take(told))
    client.attach(wire, STEP_US)
    prompt = [1 + i % 20 for i in range(40)]
    for i in range(8):
        core.add(Request(str(i), prompt, 40, SamplingParams(max_tokens=60, ignore_eos=True), seed=i))
    core.add(Request("long", prompt * 3, 120, SamplingParams(max_tokens=60, ignore_eos=True), seed=9))
    while core.has_work:
        core.step()
    opened = [frame for frame in sizes if frame]
    assert sum(map(len, opened)) == 9
    assert all(sum(frame) <= 90 or len(frame) == 1 for frame in opened)
    assert core.scheduler.stats.accepted_draft_tokens > 300, "all are guessed for in the end"
