"""A head that `train_head` writes, and what `acceptance` measures with it."""

from pathlib import Path

import pytest
import torch

from benchmarks.drafts.acceptance import NUM_DRAFTS, WAYS, Bench, Recorder, prompts
from benchmarks.drafts.calibrated_pair import TINY_DRAFT, TINY_TARGET, Pair
from benchmarks.drafts.train_head import Recorder as Features
from benchmarks.drafts.train_head import Trainee
from benchmarks.library.make_random_model import write_folder
from runtime.base.config import EngineConfig
from runtime.base.types import SamplingParams
from runtime.llm import LLM
from runtime.worker.runner import choose_numerics

CONFIG = {"device": "cpu", "kv_cache_memory": 0.05, "num_threads": 1, "max_num_seqs": 4, "max_model_len": 96}
TAPS = (1, 2, 4)
PROMPTS = [[(7 * i + 3 * j) % 509 + 2 for j in range(20 + i)] for i in range(3)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The folders: a target and its head."""
    target, head = (tmp_path_factory.mktemp(name) for name in ("target", "head"))
    pair = Pair(TINY_TARGET, TINY_DRAFT, choose_numerics(EngineConfig(device="cpu")))
    write_folder(target, pair.target_config, pair.target(0.05))
    trainee(LLM(str(target), **CONFIG)).save(head, TAPS)
    return target, head


def trainee(llm: LLM) -> Trainee:
    made = Trainee(llm.runner.decoder, len(TAPS), torch.arange(TINY_TARGET["vocab_size"]))
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():  # some steps later, every part has an effect
        for tensor in made.trained.values():
            tensor.add_(0.1 * torch.randn(tensor.shape, generator=generator))
    return made


def params(temperature: float) -> list[SamplingParams]:
    return [SamplingParams(max_tokens=24, temperature=temperature, seed=i, ignore_eos=True) for i in range(3)]


def test_training_and_engine_make_the_same_drafts(folders: tuple[Path, Path]):
    """In all passes and at all positions, sum min(p, q) is the same."""
    target, folder = folders
    bench = Bench(EngineConfig(model=str(target), deterministic=True, **CONFIG), str(folder))
    with Recorder(bench.plain) as plain:
        answers = [a.token_ids for a in bench.plain.generate(PROMPTS, params(1.0), progress=False)]
    found = bench.compare(PROMPTS, params(1.0), answers, plain.targets).found
    llm = LLM(str(target), prefix_cache=False, **CONFIG)
    head = trainee(llm)
    recorder = llm.runner.steps.head = Features(llm, TAPS)
    llm.generate(PROMPTS, params(1.0), progress=False)
    for slot in range(3):
        recorder.remove(slot)
    texts = {tuple(tokens.tolist()): features for tokens, features in recorder.texts}
    for seed, (prompt, answer) in enumerate(zip(PROMPTS, answers, strict=True)):
        tokens = torch.tensor(prompt + answer)[:-1]
        features = texts[tuple(tokens.tolist())][None]
        p, passes = head.targets(features[0]), head.log_probs(tokens[None, 1:], features[:, :-1], NUM_DRAFTS)
        first = len(prompt) + 1  # position of the first draft token
        for at in range(first, len(tokens) - NUM_DRAFTS):
            rejection = [shares[WAYS.index("rejection")] for shares, _ in found[seed, at]]
            wanted = [
                torch.minimum(p[at + j - 1], passes[j][0, at + j - 2].exp()).sum().item() for j in range(NUM_DRAFTS)
            ]
            assert rejection == pytest.approx(wanted, abs=5e-3), (seed, at)


def test_greedy_ways_accept_alike(folders: tuple[Path, Path]):
    target, folder = folders
    bench = Bench(EngineConfig(model=str(target), deterministic=True, **CONFIG), str(folder))
    found = bench.measure(PROMPTS, params(0.0))
    assert found.equal.tolist() == [3, 3]
    assert found.positions == 3 * (24 - NUM_DRAFTS)
    assert (found.sums == found.sums[0]).all()
    assert bench.repeats(PROMPTS, params(0.0), found.rounds)["equal_rounds"] == {"hits": True, "alone": True}


def test_held_out_prompts_are_others():
    held_out, trained = prompts(held_out=True), prompts(held_out=False)
    assert not set(held_out) & set(trained)
    assert [kind for kind, _ in held_out[:4]] == ["prose", "code", "lists", "prose"]
