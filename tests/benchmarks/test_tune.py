"""The tuner chooses configurations by their times; tests/triton and tests/gpu check the kernels themselves."""

import pytest
import torch

from benchmarks.kernels import tune
from benchmarks.kernels.random_weights import FORMS, random_weight
from benchmarks.kernels.tuned_products import MODELS, PRODUCTS
from benchmarks.kernels.tuning import Cell
from runtime.kernels.quantized.quantized_weight import dequantize_torch


class FakeLayers:
    """Two parts with times that depend on each other; one candidate does not fit."""

    num_layers, num_bytes = 2, 4450.0

    def __init__(self) -> None:
        self.us, self.parts = 0.0, {"first": ["fast", "misfit"], "second": ["slow alone"]}

    def run(self, choices):
        if choices.get("first") == "misfit":
            raise RuntimeError("out of resources")
        self.us = 10.0 - 4.0 * (choices.get("first") == "fast")
        if choices.get("second"):
            self.us += -1.0 if choices.get("first") == "fast" else 5.0

    def results(self, choices):
        if choices.get("first") == "misfit":
            raise RuntimeError("out of resources")
        return [torch.ones(2)]

    def exact(self):
        return [torch.ones(2, dtype=torch.float64)]

    def others(self):
        return {"library": lambda: None}


@pytest.fixture
def layers(monkeypatch: pytest.MonkeyPatch) -> FakeLayers:
    made = FakeLayers()

    def microseconds(run, num_layers, warm_up):
        try:
            run()
        except RuntimeError:
            return None
        return made.us / num_layers

    monkeypatch.setattr(tune, "microseconds", microseconds)
    return made


def test_the_tuner_keeps_the_best_of_each_part(layers: FakeLayers):
    *tried, best = tune.tune(Cell("tiny", "bf16", 1), layers, True)
    assert best["configs"] == {"first": "fast", "second": "slow alone"}
    assert (best["us"], best["rule_us"], best["error"]) == (2.5, 5.0, 0.0)
    assert best["of_floor"] == pytest.approx(0.001 / 2.5)
    misfits = [(line["us"], line["error"]) for line in tried if line["candidate"] == "misfit"]
    assert misfits == [(None, None)] * 2


def test_rules_alone_try_no_candidate(layers: FakeLayers):
    (line,) = tune.tune(Cell("tiny", "bf16", 1), layers, False)
    assert (line["configs"], line["us"]) == ({}, 5.0)


@pytest.mark.parametrize("form", FORMS)
def test_random_weights_keep_the_size_of_inputs(form: str):
    torch.manual_seed(0)
    x = torch.randn(8, 1024)
    y = x @ dequantize_torch(random_weight(form, 256, 1024, "cpu")).t()
    assert 0.3 < (y.std() / x.std()).item() < 3


@pytest.mark.parametrize("name", PRODUCTS)
def test_each_part_of_a_product_has_candidates(name: str):
    operation = PRODUCTS[name]
    layers = operation.make(Cell("tiny", operation.forms[0], operation.least_rows), "cpu")
    assert set(layers.parts) <= {product.name for product in MODELS["tiny"]}
    assert all(layers.parts.values())
