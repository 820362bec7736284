"""Heads from a model's own checkpoint: their logits against transformers' layer, ranks, and refusals."""

import pytest
import torch

from runtime.base.types import CallboardError
from runtime.worker.sources import CheckpointSource, DummySource
from tests.support.models.head_steps import HeadDriver
from tests.support.models.mtp_models import MODELS, head_tensors, oracle, random_pair, write_model

PROMPT, SAMPLE = [(7 * i + 3) % 131 for i in range(19)], 5


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_drafts_are_those_of_the_oracle(name, stacked, tmp_path):
    model, head = random_pair(name)
    source = CheckpointSource(write_model(tmp_path, model, head_tensors(name, head, stacked)))
    driver, want = HeadDriver(source), oracle(model, head, PROMPT, SAMPLE, 3)
    assert want.std() > 0.1
    got = driver.drafts(PROMPT, SAMPLE, 3)
    for position in range(3):
        torch.testing.assert_close(got[position], want[position], rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(HeadDriver(source).drafts(PROMPT, SAMPLE, 3, (4, 17)), want, rtol=1e-3, atol=1e-3)
