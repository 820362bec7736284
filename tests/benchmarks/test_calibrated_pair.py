"""The pair that times speculation: its acceptance is the one requested, and its folder has the measured weights."""

from pathlib import Path

import numpy as np
import pytest

from benchmarks.drafts.calibrated_pair import (
    DRAFTS,
    TARGET,
    TINY_DRAFT,
    TINY_TARGET,
    Pair,
    Text,
    calibrate,
    extend,
    find_matches,
    num_bytes,
    tokens_a_round,
)
from benchmarks.library.make_random_model import write_folder
from runtime.base.config import EngineConfig
from runtime.base.types import SamplingParams
from runtime.llm import LLM
from runtime.models import load_spec
from runtime.worker.runner import choose_numerics

NUMERICS = choose_numerics(EngineConfig(device="cpu"))


@pytest.fixture(scope="module")
def pair() -> Pair:
    return Pair(TINY_TARGET, TINY_DRAFT, NUMERICS)


def test_without_noise_they_are_one_model(pair: Pair):
    figures = pair.measure(0.0, num_prompts=8, seed=3)
    assert min(figures["acceptance"].values()) > 0.995
    assert 1 < figures["entropy_bits"] < 6
    assert min(figures["distinct_tokens"].values()) > 30  # of 64: no short circle


@pytest.mark.long
@pytest.mark.parametrize("wanted", [0.6, 0.8])
def test_acceptance_reaches_its_target(pair: Pair, wanted: float):
    epsilon = calibrate(pair, wanted, num_prompts=8)
    other_prompts = pair.measure(epsilon, num_prompts=16, seed=4)["acceptance"]
    assert np.mean(list(other_prompts.values())) == pytest.approx(wanted, abs=0.05)


def test_an_engine_samples_the_measured_tokens(pair: Pair, tmp_path: Path):
    write_folder(tmp_path, pair.target_config, pair.target(0.05))
    rng = np.random.default_rng(0)
    prompts = [Text(rng.integers(2, 512, 20 + i).tolist(), 20 + i, 1000 + i, i % 2 * 0.7) for i in range(4)]
    texts, _ = extend(pair.decoder(0.05), prompts, 12)
    llm = LLM(str(tmp_path), device="cpu", kv_cache_memory=0.1, num_threads=1)
    params = [SamplingParams(max_tokens=12, temperature=p.temperature, seed=p.seed, ignore_eos=True) for p in prompts]
    answers = llm.generate([p.token_ids for p in prompts], params)
    assert [answer.token_ids for answer in answers] == [text.output for text in texts]
    assert all(right.all() for right in find_matches(llm.runner.decoder, texts))


def test_sizes_match_the_speed_targets():
    def nbytes(**shape):
        return 2 * num_bytes(load_spec(TARGET | shape)[0], NUMERICS) // NUMERICS.dtype.itemsize

    small, one_b = (nbytes(tie_word_embeddings=True, **DRAFTS[name]) for name in ("small", "1b"))
    assert small * 20 <= nbytes()
    assert 2.4e9 < one_b < 2.5e9
    for shape in DRAFTS.values():
        assert shape["num_attention_heads"] == 4 * shape["num_key_value_heads"]


def test_a_round_yields_its_right_guesses_and_one_more():
    yes, no = True, False
    right = np.array([yes, yes, yes, no, yes, no, no, yes])  # two guesses a round: 3, 1, 2; a fourth is cut short
    assert tokens_a_round([right], 2) == (3 + 1 + 2) / 3
    assert tokens_a_round([np.ones(10, bool)], 4) == 5
    assert tokens_a_round([np.zeros(3, bool)], 4) == 0  # not a single whole round
