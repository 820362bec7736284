"""Assistants of Gemma 4: their drafts against transformers', the target's tokens, and refusals."""

import json
from functools import partial
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch

from runtime.assembly.runner import build_runner
from runtime.base.config import HEAD, EngineConfig
from runtime.base.types import SamplingParams
from runtime.kernels.cpu_support import obstacle
from runtime.models.heads.assistant import LAST_KEY_POSITION
from runtime.worker.runner import ModelRunner
from runtime.worker.sources import CheckpointSource
from runtime.worker.warmup import WarmUp
from tests.support.models.assistant_models import MODELS, VOCAB, oracle, random_pair, write_pair
from tests.support.models.headed_runner import Rounds

BACKENDS = ["torch", pytest.param("auto", marks=pytest.mark.skipif(obstacle() != "", reason=obstacle()))]


def prompt(length: int, salt: int = 0) -> list[int]:
    return np.random.default_rng([length, salt]).integers(0, VOCAB, length).tolist()


def open_pair(model: Path, head: Path | None, **config) -> ModelRunner:
    own = {"device": "cpu", "num_kv_blocks": 80, "max_num_seqs": 4, "max_model_len": 96, "num_threads": 1}
    own |= {"dtype": "float32", "block_size": 8, "draft": None if head is None else f"{HEAD}{head}"}
    with mock.patch.object(WarmUp, "build_kernels"), mock.patch.object(ModelRunner, "_time_steps"):
        return build_runner(EngineConfig(**own | config), CheckpointSource(model))


class Drafted:
    """Keeps the logits of a runner's draft tokens, and compares those of a round with the oracle's."""

    def __init__(self, runner: ModelRunner, want) -> None:
        self.rounds, self.want, self.kept = Rounds(runner), want, []
        head = runner.steps.head.head
        self.compute = head.logits
        head.logits = self.logits

    def logits(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        self.kept.append(self.compute(x, out).clone())
        return self.kept[-1].clone()

    def check(self, *slots: int, count: int) -> None:
        """The last `count` logits are those of these rows' draft tokens."""
        made, self.kept = self.kept[-count:], []
        for row, slot in enumerate(slots):
            drafts = self.rounds.drafts(slot, count)
            want = self.want(self.rounds.known[slot], drafts)
            for got, one, draft in zip(made, want, drafts, strict=True):
                shown = got[row].isfinite()
                assert shown.sum() in (VOCAB, 3 * VOCAB // 16)
                torch.testing.assert_close(got[row][shown], one[shown], rtol=1e-3, atol=1e-3)
                assert one.argmax() == draft
                assert one[shown].std() > 0.1


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("centroids", [False, True], ids=["dense", "centroids"])
@pytest.mark.parametrize("name", MODELS)
def test_drafts_are_those_of_the_oracle(name, centroids, backend, tmp_path):
    """Within the window and behind it, after chunks, hits and rejected draft tokens, in batches."""
    model, head = random_pair(name, centroids)
    runner = open_pair(*write_pair(tmp_path, model, head), kernel_backend=backend)
    drafted = Drafted(runner, partial(oracle, model, head))
    rounds = drafted.rounds
    rounds.prefill(0, prompt(1), drafts=3)
    drafted.check(0, count=3)
    rounds.prefill(1, prompt(61), cuts=(7, 40), drafts=2)
    drafted.check(1, count=2)
    for _ in range(2):
        rounds.verify(1, 0, given=2, drafts=3)
        drafted.check(1, 0, count=3)
