"""Images in the scheduler: any history gives the sequential tokens, and an image is encoded when a row needs it."""

import dataclasses
from collections import Counter

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from runtime.base.images import ImageSpan
from runtime.base.types import CallboardError, Request, SamplingParams
from runtime.core.scheduler import Scheduler
from runtime.features.images import RowPool
from runtime.policy.admission import Admission
from tests.support.engine.fake_runner import IMAGE, VOCAB, FixedShare
from tests.support.engine.image_runner import LENGTHS, ImageSession, ImageStateRunner, image, with_images
from tests.support.engine.sessions import TURN, Session, configs, events_of, first_plan, make, requests, with_turns
from tests.support.engine.state_runner import with_states
from tests.support.examples import examples

texts = st.lists(st.integers(1, VOCAB - 1), min_size=1, max_size=5)
shared = [[], [[1, 2, 3], 4, [5]], [[7], 3, 3, [8, 8]], [5, [9]], [[1, 2, 3], 5, [5]]]


@st.composite
def requests_with_images(draw):
    """As `requests`, with images in most prompts. Some begin alike, with the same images or others."""
    prompt, params, priority, salt = draw(requests())
    if draw(st.integers(0, 4)) == 0:
        return prompt, params, priority, salt
    more = st.lists(st.one_of(texts, st.integers(0, len(LENGTHS) - 1)), max_size=4)
    prompt, images = with_images([*draw(st.sampled_from(shared)), *draw(more), draw(texts)])
    return prompt, params, priority, salt, images


# Prompts with images are longer, and caches more often on than in other histories.
sizes = st.fixed_dictionaries(
    {
        "block_size": st.sampled_from([1, 2, 4, 7]),
        "num_kv_blocks": st.integers(14, 40),
        "max_model_len": st.integers(24, 64),
        "prefix_cache": st.sampled_from([True, True, False]),
        "kv_layout": st.sampled_from(["paged", "paged", "paged", "contiguous"]),
    }
)
histories = with_turns(events_of(requests_with_images(), st.tuples(st.just("preempt"), st.integers(0, 5))))


@pytest.mark.parametrize("kind", ["causal", "whole", "states"])
def test_any_history_gives_the_sequential_tokens(kind):
    seen = Counter()

    @settings(
        max_examples=examples(300), suppress_health_check=list(HealthCheck), database=None, derandomize=True,
        phases=[Phase.generate],
    )  # fmt: skip
    @given(configs, sizes, histories, st.integers(8, 30), st.sampled_from([None, 0.0]))
    def run(config, size, history, pool_rows, share):
        session = session_of(kind, config | size, pool_rows)
        if share is not None:
            session.core.extras[Admission].lengths = FixedShare(share)
        session.play(history)
        session.finish()
        assert session.most_beside <= (1 if kind != "states" and session.config.chunked_prefill else 9)
        scheduler = session.core.scheduler
        seen["preemptions"] += sum(kind == "preempt" for kind, _ in history)
        seen["hits"] += scheduler.stats.prompt_tokens_cached
        seen["accepted"] += session.accepted
        seen["rejected"] += session.guessed - session.accepted
        seen["encoded"] += session.num_encoded
        seen["refused"] += session.num_refused
        seen["images"] += sum(len(request.images) for request in session.added.values())

    run()
    assert seen["images"] > examples(1000), seen
    assert seen["encoded"] > examples(500), seen
    assert seen["hits"] > examples(100), seen
    assert seen["preemptions"] > examples(100), seen
    assert seen["accepted"] > examples(300), seen
    assert seen["rejected"] > examples(300), seen


def session_of(kind: str, config, pool_rows: int) -> ImageSession:
    if kind == "whole":
        most = 8 + config["max_num_seqs"]
        config |= {"max_num_batched_tokens": max(config["max_num_batched_tokens"], most)}
    if kind != "states":
        return ImageSession(pool_rows, kind == "whole", **config)
    more = {"block_size": min(config["block_size"], 4) & 6 or 1, "prefix_cache": True, "kv_layout": "paged"}
    budget = max(config["max_num_batched_tokens"], 4 + config["max_num_seqs"])
    more |= {"max_num_batched_tokens": budget, "kv_cache": with_states(4), "num_states": config["max_num_seqs"] + 5}

    class StateSession(ImageSession):
        runner_type = ImageStateRunner

    return StateSession(pool_rows, **config | more)


LARGE = {"block_size": 4, "num_kv_blocks": 100, "max_model_len": 64, "max_num_batched_tokens": 32}


def encoded(session: ImageSession, parts, **kw) -> int:
    """Serve a prompt. Return how many images its runner has encoded for it."""
    before = session.num_encoded
    session.add_parts(parts, TURN, **kw)
    session.finish()
    return session.num_encoded - before


def test_an_image_is_encoded_once_while_it_is_in_the_pool():
    session = ImageSession(**LARGE, prefix_cache=False)
    assert encoded(session, [[1], 4, [2], 4, [3]]) == 1
    assert encoded(session, [[5, 6], 4, [7]]) == 0
    assert encoded(session, [[5, 6], 5, [7]]) == 1
    assert encoded(session, [[5, 6], 6, [7]]) == 1  # makes room by number 4
    assert encoded(session, [[5, 6], 4, [7]]) == 1


def test_an_image_in_cached_blocks_alone_is_not_encoded():
    session = ImageSession(8, **LARGE)
    assert encoded(session, [[1], 4, [2, 3], 5, [6, 7, 8, 9]]) == 2  # tokens 1..9 and 12..19
    assert encoded(session, [[1], 4, [2, 3], 3, [6, 7]]) == 1
    assert encoded(session, [[1], 4, [2, 3], 5, [6, 7, 9, 9]]) == 0, "the hit ends after both"
    assert encoded(session, [[1], 4, [9]]) == 1, "the hit of 8 tokens ends within it"


def test_equal_text_with_other_images_shares_the_blocks_before():
    session = ImageSession(**LARGE)
    text = [[1, 2, 3, 4, 5], 4, [6]], [[1, 2, 3, 4, 5], 5, [6]], [[1, 2, 3, 4], 5, [6]]
    cached = []
    for parts in text:
        before = session.core.scheduler.stats.prompt_tokens_cached
        session.add_parts([*parts, [7, 8]], TURN)
        session.finish()
        cached.append(session.core.scheduler.stats.prompt_tokens_cached - before)
    assert cached == [0, 4, 4]


def test_requests_with_other_salts_share_no_embeddings():
    session = ImageSession(40, **LARGE)
    for salt, number in (("", 1), ("a", 1), ("b", 1), ("a", 0), ("", 0)):
        assert encoded(session, [[1], 4, [2]], salt=salt) == number


def test_new_weights_or_lost_runners_forget_embeddings():
    session = ImageSession(**LARGE)
    parts, scheduler = [[1], 4, [2]], session.core.scheduler
    assert [encoded(session, parts), encoded(session, parts)] == [1, 0]
    session.lose()
    assert [encoded(session, parts), encoded(session, parts)] == [1, 0]
    scheduler.use_weights(dataclasses.replace(session.info, fingerprint="new"), keeps_kv=False)
    assert [encoded(session, parts), encoded(session, parts)] == [1, 0]


def test_decoding_rows_wait_for_one_image_a_step():
    session = ImageSession(64, **LARGE)
    three = [[1], 4, [2], 5, [3], 6, [4]]
    session.add_parts(three, TURN)
    assert len(first_plan(session).encodings) == 3, "no row decodes"
    session = ImageSession(64, **LARGE)
    session.add([1, 2], SamplingParams(max_tokens=20, ignore_eos=True))
    session.step()
    session.step()
    session.add_parts(three, TURN)
    session.add_parts([[5], 2, [3]], TURN)
    sent = []
    while sum(sent) < 4:
        plan = session.core.scheduler.schedule().plan
        assert plan.num_tokens[0] == 1
        sent.append(len(plan.encodings))
        session.core.executor.submit(plan)
        session.core.collect()
    assert sent == [1, 1, 1, 1]


def test_an_image_that_stays_whole_may_exceed_the_pace():
    """Decoding rows leave one prompt token a step. The image comes in one row, even if short prompts overtake it."""
    session = ImageSession(64, True, most_beside=1, max_num_seqs=8, **LARGE)
    session.add([1, 2], SamplingParams(max_tokens=40, ignore_eos=True))
    session.step()
    session.add_parts([[1], 4, [2, 3]], TURN)
    session.add_parts([[2], 5, [2, 3]], TURN)
    for _ in range(30):
        session.add([3, 3], SamplingParams(max_tokens=1, ignore_eos=True))
        session.step()
    assert {"r1", "r2"} <= session.reasons.keys()
    assert "r0" not in session.reasons
    session.finish()


def test_a_request_whose_image_is_encoded_is_in_flight():
    """Isolation finds the image that kills the runners, also if its requests' rows differ."""
    session = ImageSession(64, **LARGE, pipeline_depth=1)
    session.add([1, 2], SamplingParams(max_tokens=30, ignore_eos=True))
    session.step()
    bad = session.add_parts([[1], 4, [2]], TURN)
    session.add_parts([[1], 5, [2]], TURN)
    for _ in range(60):
        step = session.core.scheduler.schedule()
        if step is None:
            break
        session.core.executor.submit(step.plan)
        if any(encoding.image == image(4) for encoding in step.plan.encodings):
            assert session.core.scheduler.requests[bad] in step.rows
            session.lose()
        else:
            session.core.collect()
        if bad in session.aborted:
            break
    assert session.aborted == {bad}


@pytest.mark.parametrize(
    ("spans", "error"),
    [
        ([(3, 2)], "An image has the tokens 3 to 5 of a prompt with 5"),
        ([(1, 2), (2, 2)], "send images in order"),
        ([(2, 2), (1, 1)], "send images in order"),
        ([(1, 9)], "text after the last one"),
        ([(1, 0)], "send images in order"),
        ([(0, 1)], "None of the tokens 0 to 1 is 27"),
        ([(1, 3)], "One step needs 3 embeddings of images, but the runners keep 2"),
    ],
)
def test_bad_spans_are_refused(spans, error):
    scheduler = ImageSession(2, **LARGE).core.scheduler
    images = tuple(ImageSpan(begin, length, image(1)) for begin, length in spans)
    prompt = [1, IMAGE, IMAGE, IMAGE, 2]
    with pytest.raises(CallboardError, match=error):
        scheduler.add(Request("r", prompt, len(prompt), TURN, images=images))
    assert not scheduler.requests


def test_a_model_without_an_encoder_refuses_images():
    prompt, images = with_images([[1], 4, [2]])
    with pytest.raises(CallboardError, match="takes no images; send text alone, or serve a model with"):
        Session(**LARGE).core.add(Request("r", prompt, len(prompt), TURN, images=images))
    with pytest.raises(CallboardError, match="does not serve images"):
        Scheduler(*make(**LARGE)).add(Request("r", prompt, len(prompt), TURN, images=images))


def test_an_image_that_no_step_can_hold_is_refused():
    session = ImageSession(64, True, max_num_seqs=8, **LARGE | {"max_num_batched_tokens": 15})
    prompt, images = with_images([[1], 4, [2]])
    with pytest.raises(CallboardError, match="An image has 9 tokens, which one step must compute, but 8 fit"):
        session.core.add(Request("r", prompt, len(prompt), TURN, images=images))
    whole = ImageSession(12, **LARGE | {"chunked_prefill": False})
    prompt, images = with_images([[1], 4, [2], 5, [3]])
    with pytest.raises(CallboardError, match="One step needs 16 embeddings"):
        whole.core.add(Request("r", prompt, len(prompt), TURN, images=images))


def test_ended_requests_keep_no_pixels():
    session = ImageSession(**LARGE)
    name = session.add_parts([[1], 4, [2]], TURN)
    state = session.core.scheduler.requests[name]
    session.finish()
    assert state.request.images == ()


@given(st.integers(1, 20), st.lists(st.tuples(st.integers(0, 9), st.integers(1, 20), st.sets(st.integers(0, 9)))))
def test_the_pool_gives_each_image_its_own_rows(num_rows, calls):
    """It finds a range if one is free after the images that are not held."""
    pool, rows, order = RowPool(num_rows), dict[int, range](), list[int]()
    for key, count, held in calls:
        assert pool.use(key) == (key in rows)
        if key in rows:
            order.remove(key)
            order.append(key)
            continue
        kept = {row for other in held & rows.keys() for row in rows[other]}
        fits = any(kept.isdisjoint(range(at, at + count)) for at in range(num_rows - count + 1))
        assert pool.place(key, count, held) == fits
        if fits:
            rows[key] = range(pool.first_row(key), pool.first_row(key) + count)
            assert rows[key].stop <= num_rows
            order.append(key)
        gone = [other for other in rows if other not in pool._rows]
        assert not held.intersection(gone)
        assert set(gone) == set([other for other in order if other not in held][: len(gone)]), "the oldest first"
        for other in gone:
            del rows[other]
            order.remove(other)
        taken = [row for each in rows.values() for row in each]
        assert len(taken) == len(set(taken))
        free = {row for begin, end in pool._free.items() for row in range(begin, end)}
        assert free == set(range(num_rows)) - set(taken)
