"""Images in a runner: its pool, rows in any order, the memory plan."""

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch

from runtime.base.config import EngineConfig
from runtime.base.images import ImageInfo
from runtime.base.types import CallboardError
from runtime.kernels.numerics import Numerics
from runtime.loading.checkpoint import open_checkpoint
from runtime.models.towers.specs import tower_spec
from runtime.models.towers.tower import load_tower
from runtime.worker.expected import expected_model
from runtime.worker.images import RunnerImages
from runtime.worker.memory import plan_memory
from runtime.worker.warmup import WarmUp
from tests.support.models.runner_driver import Driver, open_runner, tiny_runner
from tests.support.models.specs import TINY
from tests.support.models.tiny_images import TOKEN_ID, span_of, tiny_tower
from tests.support.models.tower_cases import CASES, save_tower_model

CPU = Numerics(torch.float32, torch.device("cpu"), "torch", packed=False, deterministic=False)
TOWER = tiny_tower(TINY.hidden_size)
SPANS = (span_of(3, 1, 2, 3), span_of(11, 2, 1, 4))
PROMPT = [5, 6, 7, *[TOKEN_ID] * 6, 8, 9, *[TOKEN_ID] * 4, 10]


def image_logits(driver: Driver, slot: int = 0, start: int = 0) -> torch.Tensor:
    """Logits after PROMPT, in a step with a text prompt and a decode row."""
    driver.open(1, PROMPT[:3])
    driver.step((1, 0, 3, 1))
    driver.open(2, list(range(20, 45)))
    driver.step((2, 0, 25, 1), (slot, start, len(PROMPT) - start, 1), (1, 3, 1, 1))
    return driver.logits[1]


@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_embeddings_reach_their_tokens_in_any_row(backend):
    driver = Driver(tiny_runner(tower=TOWER, kernel_backend=backend))
    driver.open(0, PROMPT, spans=SPANS)
    alone = driver.prefill(0, PROMPT)
    driver.free(0)
    driver.open(0, PROMPT, spans=SPANS)
    torch.testing.assert_close(image_logits(driver), alone, rtol=1e-4, atol=1e-5)
    assert driver.num_pooled == 10, "each image was encoded once"
    driver.free(0)
    driver.open(0, PROMPT)
    assert float((driver.prefill(0, PROMPT) - alone).abs().max()) > 0.01, "the tokens alone are another prompt"


def test_last_token_of_an_image_may_be_a_row():
    """Its row has one token and one sample, like the rows of a decode tape."""
    driver = Driver(tiny_runner(tower=TOWER))
    prompt = PROMPT[:15]
    driver.open(0, prompt, spans=SPANS)
    whole = driver.prefill(0, prompt)
    driver.free(0)
    driver.open(0, prompt, spans=SPANS)
    torch.testing.assert_close(driver.prefill(0, prompt, (14,)), whole, rtol=1e-4, atol=1e-5)


def test_pool_rows_are_used_again():
    runner = tiny_runner(tower=TOWER, image_pool_tokens=10, max_image_tokens=6)
    driver = Driver(runner)
    driver.open(0, PROMPT, spans=SPANS)
    want = driver.prefill(0, PROMPT)
    for seed in (7, 1):
        driver.pool.clear()
        driver.num_pooled = 0
        driver.free(0)
        spans = (span_of(3, seed, 2, 3), SPANS[1])
        driver.open(0, PROMPT, spans=spans)
        assert torch.equal(driver.prefill(0, PROMPT), want) == (seed == 1)


def test_image_with_other_tokens_is_refused():
    """Its embeddings would overwrite another image's."""
    driver = Driver(tiny_runner(tower=TOWER))
    (span, _) = SPANS
    driver.open(0, PROMPT, spans=[msgspec.structs.replace(span, num_tokens=5)])
    with pytest.raises(CallboardError, match="has 6 embeddings, but 5 tokens of its prompt stand for them"):
        driver.step((0, 0, 9, 1))


@pytest.mark.parametrize("case", CASES)
def test_smallest_image_has_one_embedding(case, tmp_path):
    """The warm-up encodes it."""
    save_tower_model(tmp_path, case)
    checkpoint = open_checkpoint(tmp_path)
    spec = tower_spec(checkpoint.config)
    info = ImageInfo(TOKEN_ID, 8, 8)
    images = RunnerImages(load_tower(checkpoint, spec, CPU), info, spec, CPU)
    images.open()
    smallest = images.smallest()
    assert images.tower.encode(smallest.image, torch.from_numpy).shape == (smallest.num_rows, spec.width)
    assert smallest.num_rows == 1


def test_warm_up_encodes_an_image():
    runner, plans = tiny_runner(tower=TOWER), []
    launch, runner.steps.launch = runner.steps.launch, lambda plan: plans.append(plan) or launch(plan)
    WarmUp(runner.steps, runner.memory).build_kernels(on_gpu=False)
    (plan,) = [plan for plan in plans if plan.has_images]
    assert [len(plan.encodings), *plan.embeds.flatten().tolist()] == [1, 0, 0, 1]
    off, plans[:] = tiny_runner(tower=TOWER, images="off"), []
    launch, off.steps.launch = off.steps.launch, lambda plan: plans.append(plan) or launch(plan)
    WarmUp(off.steps, off.memory).build_kernels(on_gpu=False)
    assert not any(plan.has_images for plan in plans)


def test_images_off_leaves_the_tower_unread():
    on, off = (tiny_runner(tower=TOWER, images=images) for images in ("auto", "off"))
    assert (on.info.images.token_id, on.info.images.pool_rows, on.info.images.max_tokens) == (TOKEN_ID, 8192, 1280)
    assert off.images is None
    assert off.info == replace(on.info, images=None)
    assert on.memory.total - off.memory.total == on.memory.tower + on.memory.images
    assert EngineConfig(draft="a/model").draft_config().images == "off"


def test_memory_plan_shows_the_encoder_and_the_pool():
    config = EngineConfig(max_model_len=64, num_kv_blocks=9, image_pool_tokens=4096).sized_for("cpu")
    plan = plan_memory(config, TINY, CPU, 1 << 30, TOWER)
    assert plan.tower == 4 * TOWER.num_weights
    assert plan.images >= 4096 * TINY.hidden_size * 4
    assert "image encoder 0.00 GiB (images) + images 0.00 GiB (image_pool_tokens, max_image_tokens)" in str(plan)
    without = plan_memory(config, TINY, CPU, 1 << 30)
    assert "image" not in str(without)
    with pytest.raises(CallboardError, match="Too little memory; serve with images=off, lower num_kv_blocks"):
        plan_memory(config, TINY, CPU, without.total + 1000, TOWER)


def test_sizes_of_images_follow_the_device():
    assert EngineConfig().sized_for("cuda").max_image_tokens == 4096
    assert EngineConfig().sized_for("cpu").max_image_tokens == 1280
    assert EngineConfig(image_pool_tokens=500).sized_for("cuda").max_image_tokens == 500
    with pytest.raises(CallboardError, match="image_pool_tokens is 500; it must be at least max_image_tokens, 600"):
        EngineConfig(image_pool_tokens=500, max_image_tokens=600)


def test_checkpoint_is_read_with_its_tower(tmp_path: Path):
    save_tower_model(tmp_path, "smolvlm")
    runner, token_id = open_runner(tmp_path), 150
    assert runner.info.images.token_id == token_id
    config = EngineConfig(model=str(tmp_path), device="cpu", kv_cache_memory=0.05)
    assert expected_model(config, gpu=False, most_bytes=1 << 33).info.images == runner.info.images
    assert expected_model(config, gpu=True, most_bytes=0).info.images.max_tokens == 4096
    assert open_runner(tmp_path, images="off").info.images is None
