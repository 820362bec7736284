"""Images in the scheduler: any history gives the sequential tokens, and an image is encoded when a row needs it."""

from collections import Counter

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from runtime.policy.admission import Admission
from tests.support.engine.fake_runner import VOCAB, FixedShare
from tests.support.engine.image_runner import LENGTHS, ImageSession, ImageStateRunner, with_images
from tests.support.engine.sessions import configs, events_of, requests, with_turns
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
    parts = [
        *draw(st.sampled_from(shared)),
        *draw(st.lists(st.one_of(texts, st.integers(0, len(LENGTHS) - 1)), max_size=4)),
    ]
    prompt, images = with_images([*parts, draw(texts)])
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
            session.core.extras[Admission].lengths = FixedShare(share)  # at 0 it admits too many
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
