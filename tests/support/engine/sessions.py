"""One engine core that is driven through events, with every output recorded."""

import pytest
from hypothesis import strategies as st

from runtime.assembly.engine import build_engine
from runtime.base.config import EngineConfig
from runtime.base.model.pooling import Pooling
from runtime.base.model_info import ModelInfo
from runtime.base.reports import PromptScores, TokenLogprobs, Vector, Verified
from runtime.base.types import CallboardError, FinishReason, Request, SamplingParams
from runtime.speculation.choose_k import Speculation
from runtime.speculation.head_drafter import HeadDrafter
from tests.support.engine.fake_runner import (
    EOS,
    VOCAB,
    FakeRunner,
    FixedPacing,
    Oracle,
    check_integrity,
    sequential,
    sequential_scores,
    sequential_vector,
)


def make(**kw) -> tuple[EngineConfig, ModelInfo]:
    blocks, max_len = kw.pop("num_kv_blocks", 40), kw.pop("max_model_len", 64)
    kv_cache, labels, num_states = kw.pop("kv_cache", None), kw.pop("num_labels", 0), kw.pop("num_states", 0)
    images, head = kw.pop("images", None), kw.pop("head", None)
    config = EngineConfig(**kw)
    size = max_len if config.kv_layout == "contiguous" else config.block_size
    if config.kv_layout == "contiguous":
        blocks = config.max_num_seqs + 1
    pooling = Pooling("last", num_labels=labels)
    places = {"kv_cache": kv_cache, "pooling": pooling, "num_states": num_states, "images": images, "head": head}
    return config, ModelInfo("f", VOCAB, max_len, (EOS,), blocks, size, "none", "none", **places)


STEP_US = ((1, 1.0), (8, 1.2), (64, 4.0))  # a step's time by its tokens
configs = st.builds(
    dict,
    block_size=st.sampled_from([1, 2, 4, 7]),
    num_kv_blocks=st.integers(6, 30),
    max_model_len=st.integers(8, 64),
    max_num_seqs=st.integers(1, 6),
    max_num_batched_tokens=st.integers(1, 24),
    pipeline_depth=st.sampled_from([1, 2]),
    policy=st.sampled_from(["fcfs", "sjf"]),
    batching=st.sampled_from(["continuous", "continuous", "static"]),
    kv_layout=st.sampled_from(["paged", "paged", "contiguous"]),
    chunked_prefill=st.booleans(),
    prefix_cache=st.booleans(),
    share_right=st.sampled_from([None, None, 0.0, 0.5, 0.9, 1.0]),
    fixed=st.sampled_from([None, 1, 3, 7]),
    most_beside=st.sampled_from([None, None, 1, 4]),
    num_labels=st.sampled_from([0, 1]),  # with some, pooled requests share prefixes
)
prefixes = [[1, 2, 3, 4, 5, 6, 7, 8, 9, 10], [1, 2, 3, 4, 11, 11, 11, 11], [5] * 12]


@st.composite
def requests(draw):
    shared = draw(st.sampled_from(prefixes))[: draw(st.integers(0, 12))]
    prompt = shared + draw(st.lists(st.integers(1, VOCAB - 1), min_size=0 if shared else 1, max_size=12))
    prompt_logprobs = draw(st.sampled_from([None, None, None, 0, 2]))
    pooled = prompt_logprobs is None and draw(st.sampled_from([False, False, False, True]))
    params = SamplingParams(
        pooled=pooled,
        max_tokens=1 if pooled else draw(st.integers(1 if prompt_logprobs is None else 0, 30)),
        prompt_logprobs=prompt_logprobs,
        ignore_eos=draw(st.sampled_from([True, False, False])),
        stop_token_ids=tuple(draw(st.sampled_from([[], [], [], [3]]))),
    )
    return prompt, params, draw(st.integers(-1, 1)), draw(st.sampled_from(["", "", "salt"]))


def events_of(requests, *more):
    """Return lists of events, with `more` kinds. The arguments of `Session.add` are drawn from `requests`."""
    return st.lists(
        st.one_of(
            st.tuples(st.just("add"), requests),
            st.tuples(st.just("burst"), st.lists(requests, min_size=3, max_size=6)),
            st.tuples(st.just("step"), st.integers(1, 6)),
            st.tuples(st.just("abort"), st.integers(0, 30)),
            st.tuples(st.just("lose"), st.none()),
            st.tuples(st.just("fail"), st.integers(0, 30)),
            *more,
        ),
        min_size=4,
        max_size=30,
    )


def with_turns(events):
    """Return lists of these events, with further turns between them."""
    parts = st.lists(st.tuples(events, st.lists(turns, max_size=4)), min_size=1, max_size=4)
    return parts.map(lambda parts: [event for some, more in parts for event in [*some, ("step", 4), *more]])


events = events_of(requests())

turns = st.tuples(st.just("turn"), st.tuples(st.integers(0, 30), st.lists(st.integers(1, 20), min_size=1, max_size=9)))
histories = with_turns(events)
TURN = SamplingParams(max_tokens=6, ignore_eos=True)


class Session:
    """Drives one engine through events and records each request's output."""

    runner_type = FakeRunner

    def __init__(self, share_right=None, fixed=None, most_beside=None, **kw) -> None:
        self.config, self.info = make(**kw)
        self.runner = self.runner_type(self.config, self.info)
        drafter = None if share_right is None else Oracle(share_right)
        if self.info.head is not None:
            drafter = HeadDrafter(self.info.head)
        speculation = None if drafter is None else Speculation(drafter, fixed, STEP_US, 0.2)
        self.core = build_engine(self.config, self.info, self.runner, speculation, FixedPacing(most_beside))
        self.added: dict[str, Request] = {}
        self.outputs: dict[str, list[int]] = {}
        self.reasons: dict[str, FinishReason] = {}
        self.scores: dict[str, list[TokenLogprobs]] = {}
        self.vectors: dict[str, bytes] = {}
        self.aborted: set[str] = set()
        self.steps = self.guessed = self.accepted = 0

    def add(self, prompt, params, priority=0, salt="", images=()) -> str | None:
        name = f"r{len(self.added)}"
        request = Request(name, list(prompt), len(prompt), params, 0, priority, salt, images=images)
        if len(prompt) >= self.core.scheduler.max_len + (params.max_tokens == 0):
            with pytest.raises(CallboardError, match="maximum context length"):
                self.core.add(request)
            return None
        self.core.add(request)
        self.added[name], self.outputs[name] = request, []
        return name

    def step(self) -> None:
        output = self.core.step()
        check_integrity(self.core)
        self.steps += 1
        if output is None:
            return
        for state, token in zip(output.states, output.token_ids, strict=True):
            name = state.request.request_id
            assert name not in self.aborted
            assert name not in self.reasons
            self.outputs[name].append(token)
        for state, report in output.reports:
            name = state.request.request_id
            assert isinstance(report, Verified) or name not in self.aborted | self.scores.keys() | self.vectors.keys()
            if isinstance(report, PromptScores):
                assert len(self.outputs[name]) == output.states.count(state), "they come with the first tokens"
                self.scores[name] = list(report.of(state.request.token_ids[1:]))
            elif isinstance(report, Vector):
                self.vectors[name] = report.numbers
            elif isinstance(report, Verified):
                self.guessed += report.num_draft_tokens
                self.accepted += report.num_accepted
        for state, reason in output.finished:
            if reason is FinishReason.ERROR:
                self.aborted.add(state.request.request_id)
            self.reasons[state.request.request_id] = reason

    def lose(self) -> None:
        self.runner = self.runner_type(self.config, self.info)
        if (culprit := self.core.lose()) is not None:  # it was alone in flight, and it was its third time
            assert culprit.num_losses >= 3
            self.aborted.add(culprit.state.request.request_id)
        self.core.recover(self.runner)
        check_integrity(self.core)

    def play(self, history) -> None:
        for kind, value in history:
            if kind == "add":
                self.add(*value)
            elif kind == "burst":
                for request in value:
                    self.add(*request)
            elif kind == "step":
                for _ in range(value):
                    self.step()
            elif kind == "abort":
                name = f"r{value}"
                if name in self.added and name not in self.reasons:
                    self.aborted.add(name)
                self.core.abort(name)
                check_integrity(self.core)
            elif kind == "fail":
                self.runner.fails = value
            elif kind == "preempt":
                if running := self.core.scheduler.running:
                    self.core.scheduler._preempt(running[value % len(running)])
            elif kind == "turn":
                number, tokens = value
                name = f"r{number % max(1, len(self.added))}"
                if name in self.added and name not in self.aborted:
                    before = self.added[name]
                    self.add([*before.token_ids, *self.outputs[name], *tokens], TURN, images=before.images)
            else:
                self.lose()

    def finish(self, most: int = 3000) -> None:
        while self.core.has_work:
            self.step()
            assert self.steps < most, "the engine makes no progress"
        assert self.core.scheduler.num_in_flight == 0
        pool = self.core.scheduler.pool
        assert pool.num_available == pool.num_blocks - 1, "blocks leaked"
        for name, request in self.added.items():
            if name not in self.aborted:
                assert (self.outputs[name], self.reasons[name]) == sequential(request, self.core.scheduler.max_len)
                assert self.scores.get(name, []) == sequential_scores(request)
                assert self.vectors.get(name) == sequential_vector(request)
                assert (name in self.scores) == (request.params.prompt_logprobs is not None)


def first_plan(session: Session):
    return session.core.scheduler.schedule().plan
