"""Image encoders against transformers, in fp32 on the CPU."""

from dataclasses import replace

import pytest
import torch

from runtime.kernels.numerics import Numerics
from runtime.loading.checkpoint import open_checkpoint
from runtime.models.towers.specs import tower_spec
from runtime.models.towers.tower import load_tower
from tests.support.models.gguf_models import GEMMA4_METADATA
from tests.support.models.mmproj_export import export_image_model
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


GGUF = {  # case -> architecture of its text, and metadata that only it has
    "gemma3": ("gemma3", {"gemma3.attention.sliding_window": 8}),
    "gemma4, clipped": ("gemma4", GEMMA4_METADATA),
    "lfm2": ("lfm2", {"lfm2.shortconv.l_cache": 3, "lfm2.rope.freq_base": 1e6}),
    "mistral3": ("llama", {"llama.rope.freq_base": 1e4}),
    "qwen3-vl": ("qwen3vl", {"qwen3vl.rope.freq_base": 5e5}),
    "smolvlm": ("llama", {"llama.rope.freq_base": 1e4}),
}


@pytest.mark.parametrize("case", GGUF)
def test_gguf_file_beside_the_model_has_the_same_tower(case, tmp_path):
    theirs = save_tower_model(tmp_path, case)
    hub, (arch, metadata) = open_checkpoint(tmp_path), GGUF[case]
    path = export_image_model(theirs, tmp_path, arch, case == "smolvlm", **metadata)
    checkpoint = open_checkpoint(path)
    want, found = tower_spec(hub.config), tower_spec(checkpoint.config)
    names = ("norm_eps", "activation", "projector", "deepstack_projector")
    fields = {name: getattr(want, name) for name in names}
    assert replace(found, **fields) == want
    image, _ = random_image(CASES[case].sizes[0], 1)
    difference = load_tower(checkpoint, found, NUMERICS).encode(image) - load_tower(hub, want, NUMERICS).encode(image)
    assert difference.abs().max() < 2e-5
