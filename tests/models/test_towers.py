"""Image encoders against transformers, in fp32 on the CPU."""

import pytest
import torch

from runtime.kernels.numerics import Numerics
from runtime.loading.checkpoint import open_checkpoint
from runtime.models.towers.specs import tower_spec
from runtime.models.towers.tower import load_tower
from tests.support.models.tower_cases import CASES, random_image, save_tower_model

NUMERICS = Numerics(torch.float32, torch.device("cpu"), "torch", packed=False, deterministic=False)


@pytest.mark.parametrize("case", CASES)
def test_features_equal_transformers(case, tmp_path, record_property):
    theirs = save_tower_model(tmp_path, case)
    checkpoint = open_checkpoint(tmp_path)
    spec = tower_spec(checkpoint.config)
    tower, worst = load_tower(checkpoint, spec, NUMERICS), 0.0
    for seed, sizes in enumerate(CASES[case].sizes):
        image, pictures = random_image(sizes, seed)
        with torch.no_grad():
            wanted = CASES[case].features(theirs, spec, pictures)
        features = tower.encode(image)
        assert features.shape == wanted.shape == (sum(spec.num_embeddings(*size) for size in sizes), spec.width)
        worst = max(worst, float((features - wanted).abs().max() / wanted.abs().max()))
    record_property("difference", worst)
    assert worst < 2e-5
