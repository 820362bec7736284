"""Engines on one region, one after another. The models have windows, states, and groups with two shapes."""

from pathlib import Path

import pytest
import torch

from tests.support.models.hybrid_engine import Engine, prompt_of

ON_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
MODELS = {"cpu": ("delta", "conv", "windows", "shapes"), "cuda": ("wide", "conv", "windows")}
CASES = [
    pytest.param(model, device, marks=ON_GPU if device == "cuda" else [])
    for device, models in MODELS.items()
    for model in models
]


@pytest.mark.parametrize(("model", "device"), CASES)
def test_new_engine_continues_with_the_same_answers(model: str, device: str, tmp_path: Path, monkeypatch):
    """To the bit, log-probabilities included. Rows of other requests share the steps."""
    monkeypatch.setenv("CALLBOARD_TIER", str(tmp_path))
    dtype = "float32" if device == "cpu" else "bfloat16"

    def run(**config) -> Engine:
        settings = {"device": device, "dtype": dtype, "num_kv_blocks": 1200, "snapshot_memory": 0.1}
        engine = Engine(model, **settings, kv_tier_memory=0.3, **config)
        for kind in range(3):
            engine.add(f"long {kind}", prompt_of(kind, 380 - kind))
            engine.add(f"short {kind}", prompt_of(kind, 70))
        engine.finish()
        return engine

    want = run().answers
    first = run(kv_tier_name="test")
    assert first.answers == want
    first.core.executor._runner.tier.close()
    second = run(kv_tier_name="test")
    assert second.answers == want
    stats = second.core.stats()
    assert stats["tier_hit_tokens"] >= 3 * 256
    assert stats["tier_damaged"] == 0
    second.core.executor._runner.tier.close()
