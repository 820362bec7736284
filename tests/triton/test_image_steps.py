"""Steps with images on the GPU path are launched. Later steps may be graphs."""

import pytest
import torch

from runtime.base.model.rope_spec import RopeSpec
from runtime.worker.runner import ModelRunner
from tests.support.kernels.triton_engine import SHALLOW, replayed_graphs
from tests.support.models.runner_driver import Driver, tiny_runner
from tests.support.models.specs import changed
from tests.support.models.tiny_images import TOKEN_ID, span_of, tiny_tower

SPEC = changed(SHALLOW, hidden_size=64, num_heads=2, ffn_size=64)
SPANS = (span_of(2, 1, 2, 2), span_of(9, 2, 1, 3))
PROMPT = [5, 6, *[TOKEN_ID] * 4, 7, 8, 9, *[TOKEN_ID] * 3]


def logits_of(driver: Driver) -> list[torch.Tensor]:
    """Logits of three rows: a prompt with images in two chunks, a text, and a row that decodes first."""
    driver.open(0, [3, 4, 5])
    driver.step((0, 0, 3, 1))
    driver.open(1, PROMPT, spans=SPANS)
    driver.open(2, list(range(20, 30)))
    driver.step((1, 0, 11, 0), (2, 0, 10, 1), (0, 3, 1, 1))
    found = [driver.logits]
    driver.step((0, 4, 1, 1), (1, 11, 1, 1))  # the last token of an image
    found.append(driver.logits)
    for step in range(2):
        driver.step((0, 5 + step, 1, 1), (1, 12 + step, 1, 1))
        found.append(driver.logits)
    return found


@pytest.mark.usefixtures("wide_products")
@pytest.mark.parametrize(
    ("fields", "deterministic"),
    [
        ({}, False),
        ({"rope": RopeSpec(partial=0.5, sections=(6, 5, 5), mixed_sections=True)}, False),
        ({"whole_images": True, "window": 6}, False),
        ({"whole_images": True, "window": 6}, True),
    ],
    ids=["causal", "sections", "whole", "deterministic"],
)
def test_steps_with_images_are_launched(fields, deterministic, monkeypatch):
    """Later rows are in a graph, which shifts their rotary positions."""
    monkeypatch.setattr(ModelRunner, "_warm_up", lambda self: None)
    spec = changed(SPEC, **fields)
    config = {
        "deterministic": deterministic,
        "num_kv_blocks": 24,
        "max_num_seqs": 4,
        "max_model_len": 96,
        "dtype": "float32",
    }
    runners = [
        tiny_runner(spec, tower=tiny_tower(64), kernel_backend=name, image_pool_tokens=8, max_image_tokens=4, **config)
        for name in ("torch", "triton")
    ]
    want = logits_of(Driver(runners[0]))
    replays = replayed_graphs(runners[1].steps, (1, 2))
    for logits, expected in zip(logits_of(Driver(runners[1])), want, strict=True):
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    assert [replay.count for replay in replays] == [2]
