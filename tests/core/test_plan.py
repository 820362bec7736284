"""The step codec: decoding restores the input, and a damaged frame is refused."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.base.reports import Experts, GrammarSamples, PromptScores, Vector, Verified
from runtime.base.types import CallboardError, Grammar, SamplingParams
from runtime.core.plan import NewSlot, StepPlan, StepResult, decode_plan, decode_result, encode_plan, encode_result

int32 = st.integers(-(2**31), 2**31 - 1)
arrays = st.lists(int32, max_size=20).map(lambda v: np.array(v, np.int32))
float32 = st.floats(width=32, allow_nan=False, allow_infinity=False)
texts = st.text(st.characters(codec="utf-8"), max_size=9)
params = st.builds(
    SamplingParams,
    max_tokens=st.integers(8, 2**31 - 1),
    temperature=st.floats(0, 64, width=32),
    top_k=st.integers(0, 2**31 - 1),
    top_p=st.floats(0.125, 1, width=32),
    min_p=st.floats(0, 1, width=32),
    repetition_penalty=st.floats(0.125, 64, width=32),
    frequency_penalty=st.floats(-2, 2, width=32),
    presence_penalty=st.floats(-2, 2, width=32),
    logit_bias=st.lists(st.tuples(int32, float32), max_size=5).map(tuple),
    min_tokens=st.integers(0, 8),
    stop_token_ids=st.lists(int32, max_size=5).map(tuple),
    ignore_eos=st.booleans(),
    logprobs=st.none() | st.integers(0, 20),
    prompt_logprobs=st.none() | st.integers(0, 20),
    grammar=st.none() | st.builds(Grammar, texts, texts, texts),
) | st.builds(SamplingParams, max_tokens=st.just(0), prompt_logprobs=st.integers(0, 20))
new_slots = st.builds(
    NewSlot,
    slot=int32,
    token_ids=arrays,
    prompt_len=int32,
    seed=st.integers(-(2**63), 2**63 - 1),
    params=params,
    adapter=int32,
)


@st.composite
def plans(draw):
    num_rows, num_writes = draw(st.integers(0, 9)), draw(st.integers(0, 9))
    column = st.lists(int32, min_size=num_rows, max_size=num_rows).map(lambda v: np.array(v, np.int32))
    writes = draw(st.lists(int32, min_size=3 * num_writes, max_size=3 * num_writes))
    return StepPlan(
        draw(st.integers(0, 2**62)),
        draw(arrays),
        draw(st.lists(new_slots, max_size=3)),
        np.array(writes, np.int32).reshape(3, num_writes),
        *(draw(column) for _ in range(4)),
        draw(column | st.just(np.zeros(0, np.int32))),
        draw(arrays),
        draw(st.integers(1, 9)),
    )


def same(a, b):
    if isinstance(a, np.ndarray):
        return a.shape == b.shape and a.dtype == b.dtype and bool((a == b).all())
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    if hasattr(a, "__slots__"):
        return all(same(getattr(a, f), getattr(b, f)) for f in a.__slots__)
    return a == b


@given(plans())
def test_plan_survives_the_wire(plan):
    assert same(plan, decode_plan(encode_plan(plan)))


@given(plans(), st.integers(1, 40))
def test_cut_plan_is_refused(plan, cut):
    frame = encode_plan(plan)
    with pytest.raises(CallboardError):
        decode_plan(frame[: max(0, len(frame) - cut)])
    with pytest.raises(CallboardError):
        decode_plan(frame + b"x" * cut)


@given(st.integers(0, 2**62), arrays, st.integers(0, 9), st.integers(0, 5), st.randoms())
def test_result_survives_the_wire(step_id, token_ids, m, n, random):
    ints = lambda *shape: np.array([random.randrange(2**31) for _ in range(int(np.prod(shape)))], np.int32)  # noqa: E731
    columns = ints(m), ints(m).astype(np.float32), ints(m, n).reshape(m, n), ints(m, n).astype(np.float32).reshape(m, n)
    scores = PromptScores(*(column.tobytes() for column in columns))
    failures = {i: f"Too long: é {i}." for i in range(random.randrange(3))}
    samples = GrammarSamples(ints(m).tolist(), failures, (random.randrange(9), random.randrange(9)))
    result = StepResult(
        step_id,
        token_ids,
        ints(m),
        *columns,
        sampling_logprobs=ints(m).astype(np.float32),
        reports=[(0, scores), (2, Vector(b"1234")), (2, Experts(b"12")), (5, Verified(3, 2, 1)), (-1, samples)],
    )
    found = decode_result(encode_result(result))
    assert same(result, found)
    assert found.reports == result.reports
    entries = found.reports[0][1].of(range(m)[::-1])
    assert len(entries) == len(scores) == m
    for i, (token_id, logprob, rank, top, _) in enumerate(entries):
        assert (token_id, logprob, rank) == (m - 1 - i, result.logprobs[i], result.ranks[i])
        assert top == tuple(zip(result.top_ids[i].tolist(), result.top_logprobs[i].tolist(), strict=True))


def test_wrong_magic_is_refused():
    frame = encode_plan(StepPlan(1))
    with pytest.raises(CallboardError, match="not a step result"):
        decode_result(frame)
    with pytest.raises(CallboardError, match="not a step plan"):
        decode_plan(encode_result(StepResult(1, np.zeros(0, np.int32))) + b"\0" * 16)


def test_bad_params_name_the_field():
    with pytest.raises(CallboardError, match=r"top_p is -0\.1"):
        SamplingParams(top_p=-0.1)
    with pytest.raises(CallboardError, match="min_tokens"):
        replace(SamplingParams(max_tokens=3), min_tokens=4)
    with pytest.raises(CallboardError, match="max_tokens is 0"):
        SamplingParams(max_tokens=0)
    with pytest.raises(CallboardError, match="prompt_logprobs is 21"):
        SamplingParams(max_tokens=0, prompt_logprobs=21)
