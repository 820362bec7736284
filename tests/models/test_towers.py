"""Image encoders against transformers, in fp32 on the CPU."""

import json
from dataclasses import replace

import pytest
import torch
import transformers

from runtime.base.images import ImageSpan
from runtime.kernels.numerics import Numerics
from runtime.loading.checkpoint import open_checkpoint
from runtime.models import load_spec
from runtime.models.towers import positions
from runtime.models.towers.specs import TOWERS, tower_spec
from runtime.models.towers.tower import load_tower
from tests.support.models.gguf_models import GEMMA4_METADATA
from tests.support.models.mmproj_export import export_image_model
from tests.support.models.runner_driver import Driver, open_runner
from tests.support.models.tiny_images import tiny_tower
from tests.support.models.tower_cases import CASES, IMAGE, features, random_image, save_tower_model

NEW = 64  # tokens
NUMERICS = Numerics(torch.float32, torch.device("cpu"), "torch", packed=False, deterministic=False)


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("case", CASES)
def test_features_equal_transformers(case, backend, tmp_path, record_property):
    theirs = save_tower_model(tmp_path, case)
    checkpoint = open_checkpoint(tmp_path)
    spec = tower_spec(checkpoint.config)
    tower, worst = load_tower(checkpoint, spec, replace(NUMERICS, backend=backend)), 0.0
    for seed, sizes in enumerate(CASES[case].sizes):
        image, pictures = random_image(sizes, seed)
        wanted, found = features(theirs, CASES[case].inputs(spec, pictures)), tower.encode(image)
        assert found.shape == wanted.shape == (sum(spec.num_embeddings(*size) for size in sizes), spec.width)
        worst = max(worst, float((found - wanted).abs().max() / wanted.abs().max()))
    record_property("difference", worst)
    assert worst < 2e-5


@pytest.mark.parametrize("architecture", TOWERS)
def test_keys_that_a_config_lacks_have_the_class_default(architecture):
    stated = {"vision_config": {}, "mm_tokens_per_image": 49}
    config = getattr(transformers, architecture).config_class(**stated)
    complete = json.loads(config.to_json_string(use_diff=False)) | {"architectures": [architecture]}
    text = {"hidden_size": 4096, "model_type": complete["text_config"]["model_type"]}
    assert tower_spec(stated | {"architectures": [architecture], "text_config": text}) == tower_spec(
        complete | {"text_config": text}
    )


def test_sizes_share_what_is_copied_to_the_device():
    """A copy from the host waits for the device."""
    spec, before = tiny_tower(8), positions._frequencies.cache_info()
    for rows, columns in ((2, 3), (5, 4), (2, 3)):
        assert positions.rotary_positions(spec, rows, columns, torch.device("cpu"))[0].shape[0] == rows * columns
    after = positions._frequencies.cache_info()
    assert after.hits >= before.hits + 2
    assert after.misses <= before.misses + 1


WHOLE = (
    "mistral3", "smolvlm", "qwen3.5", "qwen3-vl", "qwen3-vl, experts", "glm4v", "glm4v, experts", "internvl", "gemma3",
    "gemma4", "gemma4, inputs", "lfm2",
)  # fmt: skip


@pytest.mark.parametrize("case", WHOLE)
def test_logits_after_two_images_equal_transformers(case, tmp_path, record_property):
    theirs, kind = save_tower_model(tmp_path, case), CASES[case]
    driver = Driver(open_runner(tmp_path, max_image_tokens=64, image_pool_tokens=128))
    spec, generator = driver.runner.images.tower.spec, torch.Generator().manual_seed(1)
    tokens, spans, pictures = [], [], []
    for number in range(2):
        image, own = random_image(kind.sizes[0], number)
        height, width = (side // spec.patch_size // spec.merge for side in image.sizes[0])
        tokens += torch.randint(3, 149, (7,), generator=generator).tolist()
        spans.append(ImageSpan(len(tokens), height * width * len(own), image, (1, height, width)))
        tokens += [IMAGE] * spans[-1].num_tokens
        pictures += own
    tokens += [5, 6, 7]
    prompt_len, logits = len(tokens), []
    driver.open(0, tokens, room=NEW, spans=spans)
    whole = driver.runner.info.images.stays_whole
    logits.append(driver.prefill(0, tokens, () if whole else (spans[0].begin + 1, spans[1].end - 1)))
    for _ in range(NEW - 1):
        tokens.append(int(logits[-1].argmax()))
        driver.step((0, len(tokens) - 1, 1, 1))
        logits.append(driver.logits[0])
    ids, inputs = torch.tensor([tokens]), kind.inputs(spec, pictures)
    if case.startswith(("qwen", "gemma", "glm")):
        inputs["token_type_ids" if case == "gemma3" else "mm_token_type_ids"] = (ids == IMAGE).long()
    with torch.no_grad():
        wanted = theirs(ids, **inputs).logits[0, prompt_len - 1 :]
    difference = float((torch.stack(logits) - wanted).abs().max() / wanted.abs().max())
    record_property("difference", difference)
    assert difference < 2e-5


GGUF = {  # case -> architecture of its text, and metadata that only it has
    "gemma3": ("gemma3", {"gemma3.attention.sliding_window": 8}),
    "gemma4, clipped": ("gemma4", GEMMA4_METADATA),
    "glm4v": ("glm4", {"glm4.rope.dimension_count": 8, "glm4.rope.dimension_sections": [1, 2, 1, 0]}),
    "lfm2": ("lfm2", {"lfm2.shortconv.l_cache": 3, "lfm2.rope.freq_base": 1e6}),
    "mistral3": ("llama", {"llama.rope.freq_base": 1e4}),
    "qwen3-vl": ("qwen3vl", {"qwen3vl.rope.freq_base": 1e4, "qwen3vl.rope.dimension_sections": [4, 2, 2, 0]}),
    "smolvlm": ("llama", {"llama.rope.freq_base": 1e4}),
}


@pytest.mark.parametrize("case", GGUF)
def test_gguf_file_beside_the_model_has_the_same_tower(case, tmp_path):
    theirs = save_tower_model(tmp_path, case)
    hub, (arch, metadata) = open_checkpoint(tmp_path), GGUF[case]
    path = export_image_model(theirs, tmp_path, arch, case == "smolvlm", **metadata)
    checkpoint = open_checkpoint(path)
    want, found = tower_spec(hub.config), tower_spec(checkpoint.config)
    if case == "qwen3-vl":  # rotary positions have sections
        assert load_spec(hub.config)[0].layers == load_spec(checkpoint.config)[0].layers
    names = ("norm_eps", "activation", "projector", "deepstack_projector")
    fields = {name: getattr(want, name) for name in names}
    assert replace(found, **fields) == want
    image, _ = random_image(CASES[case].sizes[0], 1)
    difference = load_tower(checkpoint, found, NUMERICS).encode(image) - load_tower(hub, want, NUMERICS).encode(image)
    assert difference.abs().max() < 2e-5
