"""Positions of images' tokens: rotary ones, and the last position that each token sees, against transformers."""

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from runtime.core.plan import NewSlot
from runtime.kernels.attention.rope import rope_axes, rope_table, rope_table_of_step
from runtime.kernels.cpu_support import obstacle
from runtime.models import load_spec
from runtime.models.rope import rope_spec
from runtime.worker.image_positions import ImagePositions, rotary_positions
from runtime.worker.runner import ModelRunner
from tests.support.models.runner_driver import GREEDY, Driver, open_runner

COMPILED = pytest.mark.skipif(bool(obstacle()), reason=str(obstacle()))
BACKENDS = ["torch", pytest.param("llvm", marks=COMPILED)]
TEXT = {
    "vocab_size": 128, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8, "max_position_embeddings": 512, "pad_token_id": 0,
    "eos_token_id": 1, "bos_token_id": 1,
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1], "mrope_interleaved": True,
        "partial_rotary_factor": 0.5,
    },
}  # fmt: skip
VISION = {
    "depth": 1, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 32,
    "num_position_embeddings": 16, "patch_size": 4,
}  # fmt: skip
IMAGE = 100  # token id
_GEMMA = {name: TEXT[name] for name in TEXT if not name.startswith(("linear", "rope"))} | {
    "sliding_window": 7, "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
}  # fmt: skip
GEMMA = {
    "gemma3_text": _GEMMA | {"query_pre_attn_scalar": 16},
    "gemma4_text": _GEMMA | {
        "use_bidirectional_attention": "vision", "global_head_dim": 32, "num_kv_shared_layers": 0,
        "hidden_size_per_layer_input": 0, "use_double_wide_mlp": False,
    },
}  # fmt: skip
ARCHITECTURES = {"gemma3_text": "Gemma3ForCausalLM", "gemma4_text": "Gemma4ForCausalLM"}


def random_prompt(rng: random.Random, largest: int = 8) -> tuple[list[int], list[tuple[int, ...]]]:
    """Token ids with up to four images, and spans as in NewSlot."""
    ids: list[int] = []
    spans = []
    for _ in range(rng.randint(0, 4)):
        ids += [rng.randint(2, 99) for _ in range(rng.randint(0, 9))]
        rows, columns = rng.randint(1, largest), rng.randint(1, largest)
        spans.append((len(ids), rows * columns, 1, rows, columns))
        ids += [IMAGE] * (rows * columns) + [rng.randint(2, 99)]  # images do not touch
    return ids + [rng.randint(2, 99) for _ in range(rng.randint(1, 9))], spans


def whole_positions(num_tokens: int, spans: list[tuple[int, ...]]) -> np.ndarray:
    known, delta = rotary_positions(np.array(spans, np.int32).reshape(-1, 5))
    behind = np.arange(known.shape[1], num_tokens) + delta
    assert delta <= 0
    return np.concatenate((known, np.tile(behind, (3, 1))), 1)


@pytest.mark.parametrize("kind", ["qwen3_5", "qwen3_vl", "qwen2_5_vl", "glm4v"])
def test_rotary_positions_are_those_of_transformers(kind):
    text = TEXT if kind == "qwen3_5" else {name: x for name, x in TEXT.items() if not name.startswith("linear")}
    vision = VISION if kind in ("qwen3_5", "qwen3_vl") else {"depth": 0, "hidden_size": 32, "num_heads": 2}
    if kind == "qwen3_vl":
        vision = {**vision, "deepstack_visual_indexes": []}
    config = AutoConfig.for_model(
        kind, text_config=text, vision_config=vision, image_token_id=IMAGE, video_token_id=101
    )
    model = AutoModelForImageTextToText.from_config(config)
    rng = random.Random(0)
    for _ in range(50):
        ids, spans = random_prompt(rng)
        grids = [[1, 2 * rows, 2 * columns] for *_, rows, columns in spans]
        kinds = torch.tensor([[int(token == IMAGE) for token in ids]])
        want, delta = model.model.get_rope_index(
            torch.tensor([ids]), mm_token_type_ids=kinds, image_grid_thw=torch.tensor(grids) if grids else None
        )
        assert np.array_equal(whole_positions(len(ids), spans), want[:, 0].numpy())
        assert rotary_positions(spans)[1] == int(delta)


@pytest.mark.parametrize(
    ("kind", "head_dim", "rope"),
    [
        ("qwen3_5", 256, {"rope_theta": 1e7, "partial_rotary_factor": 0.25, "mrope_section": [11, 11, 10],
                          "mrope_interleaved": True}),
        ("qwen3_vl", 128, {"rope_theta": 5e6, "mrope_section": [24, 20, 20], "mrope_interleaved": True}),
        ("qwen2_5_vl", 128, {"rope_theta": 1e6, "mrope_section": [16, 24, 24]}),
        ("glm4v", 128, {"rope_theta": 1e4, "mrope_section": [8, 12, 12], "partial_rotary_factor": 0.5}),
    ],
)  # fmt: skip
def test_rotary_tables_are_those_of_transformers(kind, head_dim, rope):
    module = __import__(f"transformers.models.{kind}.modeling_{kind}", fromlist=["x"])
    names = {"qwen3_5": "Qwen3_5", "qwen3_vl": "Qwen3VL", "qwen2_5_vl": "Qwen2_5_VL", "glm4v": "Glm4v"}
    rotary_class = next(
        getattr(module, names[kind] + end)
        for end in ("TextRotaryEmbedding", "RotaryEmbedding")
        if hasattr(module, names[kind] + end)
    )
    sizes = {"hidden_size": 2 * head_dim, "num_attention_heads": 2, "head_dim": head_dim}
    config = AutoConfig.for_model(f"{kind}_text", **sizes, rope_parameters={"rope_type": "default", **rope})
    positions = torch.randint(0, 500, (3, 64), generator=torch.Generator().manual_seed(0))
    want_cos, want_sin = rotary_class(config)(torch.zeros(1), positions[:, None])
    spec = rope_spec({
        "rope_scaling": None, "rope_parameters": config.rope_parameters, "rope_theta": 1.0,
        "partial_rotary_factor": 1.0, "max_position_embeddings": 500,
    })  # fmt: skip
    table, axes = rope_table(spec, head_dim, 500, torch.float32), rope_axes(spec, head_dim)
    cos, sin = rope_table_of_step(table, axes, positions)
    count = sum(rope["mrope_section"])
    if kind == "glm4v":  # pairs of neighbours
        want_cos, want_sin = want_cos[..., ::2], want_sin[..., ::2]
    assert torch.equal(cos[:, :count], want_cos[0, :, :count])
    assert torch.equal(sin[:, head_dim // 2 : head_dim // 2 + count], want_sin[0, :, :count])
    equal = positions[:1].expand(3, -1)
    assert torch.equal(rope_table_of_step(table, axes, equal), table[:, positions[0]])


def masks_of(config, num_tokens: int, spans: list[tuple[int, ...]]) -> dict[str, torch.Tensor]:
    """Both kinds of layers' masks, from transformers."""
    kind = config.model_type.removesuffix("_text")
    modeling = __import__(f"transformers.models.{kind}.modeling_{kind}", fromlist=["x"])
    is_image = torch.zeros(1, num_tokens, dtype=torch.int64)
    for begin, count, *_ in spans:
        is_image[0, begin : begin + count] = 1
    return modeling.create_masks_for_vision_model(
        config=config, inputs_embeds=torch.zeros(1, num_tokens, 32), attention_mask=None, cache=None,
        position_ids=torch.arange(num_tokens)[None],
        block_sequence_ids=modeling.get_block_sequence_ids_for_mask(is_image, device="cpu"),
    )  # fmt: skip


@pytest.mark.parametrize("kind", ["gemma3_text", "gemma4_text"])
def test_visible_positions_are_those_of_transformers(kind):
    config = AutoConfig.for_model(kind, **GEMMA[kind])
    config._attn_implementation = "eager"
    spec, window = load_spec(config.to_dict() | {"architectures": [ARCHITECTURES[kind]]})[0], 7
    assert spec.whole_images
    rng, images = random.Random(2), ImagePositions(spec, 1)
    for _ in range(50):
        ids, spans = random_prompt(rng)
        if not spans:
            continue
        n = len(ids)
        images.add(NewSlot(0, np.array(ids, np.int32), n, 0, GREEDY, spans=np.array(spans, np.int32)))
        _, last = images.for_rows(*np.array([[0], [0], [n]], np.int32))
        masks = masks_of(config, n, spans)
        keys, queries = np.arange(n), np.arange(n)[:, None]
        seen = {True: keys <= last[:, None], False: keys <= queries}
        layers = {layer.mixer.window: seen[layer.mixer.whole_images] for layer in spec.layers}
        assert np.array_equal(masks["full_attention"][0, 0].numpy() == 0, layers[0])
        within = layers[window] & (keys > queries - window)
        assert np.array_equal(masks["sliding_attention"][0, 0].numpy() == 0, within)


def tiny(kind: str, folder: Path, **config):
    """A tiny text model with random weights, which is also saved to the folder."""
    torch.manual_seed(0)
    own = AutoConfig.for_model(kind, **config)
    own._attn_implementation = "eager"
    model = AutoModelForCausalLM.from_config(own, dtype=torch.float32).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder)
    return model


def expected(model, ids: list[int], spans: list[tuple[int, ...]]) -> tuple[list[int], torch.Tensor]:
    """Six more tokens, and the logits of all."""
    tokens, masks = ids[:], {}
    while True:
        positions = torch.from_numpy(whole_positions(len(tokens), spans))
        if "gemma" in model.config.model_type:
            positions = torch.arange(len(tokens))
            masks["attention_mask"] = masks_of(model.config, len(tokens), spans)
        with torch.inference_mode():
            logits = model(torch.tensor([tokens]), position_ids=positions[..., None, :], use_cache=False, **masks)
        if len(tokens) == len(ids) + 6:
            return tokens, logits.logits[0]
        tokens.append(int(logits.logits[0, -1].argmax()))


def open_slot(
    driver: Driver, slot: int, tokens: list[int], spans: list[tuple[int, ...]], shared: list[int] | None = None
) -> None:
    """A request with images that are embedded as tokens: the model lacks a tower."""
    driver.open(slot, tokens, shared=shared)
    driver.plan.new[-1].spans = np.array(spans, np.int32).reshape(-1, 5)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("kind", ["qwen3_5_text", "gemma3_text", "gemma4_text"])
def test_logits_of_a_prompt_with_images(kind, deterministic, backend, tmp_path):
    """The prompt runs whole, in chunks, or behind a hit, then decodes. One without images shares a step with it."""
    model = tiny(kind, tmp_path, **(TEXT if kind == "qwen3_5_text" else GEMMA[kind]))
    runner: ModelRunner = open_runner(
        tmp_path, dtype="float32", kernel_backend=backend, deterministic=deterministic, max_model_len=256, block_size=16
    )
    rng, near = random.Random(1), {"atol": 3e-4, "rtol": 3e-4}
    for _ in range(4):
        ids, spans = random_prompt(rng, largest=5)
        tokens, want = expected(model, ids, spans)
        driver = Driver(runner)
        open_slot(driver, 3, tokens, spans)
        driver.prefill(3, ids)
        cuts = tuple(span[0] + span[1] for span in spans) if runner.spec.whole_images else (3, 20, len(ids) - 1)
        for where, hit in (((), 0), (cuts, 0), ((), min(len(ids) - 1, 40) // 16)):
            shared = driver.tables[3][:hit] if not runner.info.num_states else None
            open_slot(driver, 0, tokens, spans, shared)
            driver.open(1, ids[:5])
            got = driver.prefill(0, ids, where, 16 * len(shared or ()))
            torch.testing.assert_close(got, want[len(ids) - 1], **near)
            driver.step((1, 0, 4, 0))
            for i in range(3):
                driver.step((0, len(ids) + i, 1, 1), *([(1, 4, 1, 1)] if i == 0 else []))
                torch.testing.assert_close(driver.logits[0], want[len(ids) + i], **near)
            driver.step((0, len(ids) + 3, 3, 3))  # draft tokens
            torch.testing.assert_close(driver.logits, want[len(ids) + 3 :], **near)
            driver.free(0)
            driver.free(1)
