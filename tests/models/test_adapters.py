"""Adapters (LoRA): their files, their effect, and rows of many of them in one step."""

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.library.make_adapter import modules_of, save_adapter
from runtime.base.types import CallboardError
from runtime.loading.adapter_files import read_adapter
from tests.support.models.family_cases import save_model
from tests.support.models.runner_driver import TINY, Driver, open_runner, tiny_runner


def with_peft(model, matrices, scales):
    """The transformers model computes W x + scale * B (A x), as peft does without merging; returns a function that
    undoes it."""
    handles = []
    for name, (a, b) in matrices.items():

        def add(_, inputs, output, a=a, b=b, scale=scales[name]):
            return output + scale * (inputs[0] @ a.T @ b.T)

        handles.append(model.get_submodule(name).register_forward_hook(add))
    return handles


@pytest.mark.parametrize(
    "case",
    [
        "llama, all heads, biases",
        "phi4-mini",
        "gpt2",
        "qwen3 moe",
        "gemma2",
        "gemma3, with a vision tower",
        "qwen3.5",
        "qwen3-next",
        "lfm2",
        "lfm2 moe",
        "glm4 moe",
    ],
)
@torch.no_grad()
def test_rows_of_two_adapters_equal_unmerged_math(case, tmp_path):
    theirs = save_model(tmp_path / "model", case)
    skipped = "lm_head", "expert", "projector"  # and maps of a vision tower are left out
    modules = {}
    for name, module in theirs.named_modules():
        if any(word in name for word in skipped) or not hasattr(module, "weight") or name.endswith("mlp.gate"):
            continue
        if isinstance(module, torch.nn.Linear) or type(module).__name__ == "Conv1D":
            transposed = type(module).__name__ == "Conv1D"
            modules[name] = tuple(module.weight.shape[::-1] if transposed else module.weight.shape)
    names = sorted(modules)
    # The first has all maps, with patterns; the second some, with rslora.
    ranks = {name: 2 for name in names if ".0." in name or ".h.0." in name}
    first = save_adapter(
        tmp_path / "first",
        modules,
        1,
        ranks,
        rank_pattern={r".*\.0\..*": 2},
        alpha_pattern={names[0].split(".", 1)[1]: 3},
    )
    some = {name: modules[name] for name in names[::2]}
    second = save_adapter(tmp_path / "second", some, 2, use_rslora=True)
    scales = {name: (3 if name == names[0] else 8) / (2 if name in ranks else 4) for name in names}
    runner = open_runner(tmp_path / "model", max_loras=3, max_lora_rank=5)
    runner.load_adapter(3, str(tmp_path / "first"))
    runner.load_adapter(1, str(tmp_path / "second"))
    driver, prompt = Driver(runner), [3 + 7 * i % 97 for i in range(40)]  # longer than any short rope
    for slot, adapter in enumerate((3, 0, 1)):
        driver.open(slot, prompt, adapter=adapter)
    driver.step(*((slot, 0, len(prompt), 1) for slot in range(3)))
    got = driver.logits.clone()
    for logits, matrices, scale in (
        (got[0], first, scales), (got[1], {}, {}), (got[2], second, dict.fromkeys(some, 8 / math.sqrt(4))),
    ):  # fmt: skip
        handles = with_peft(theirs, matrices, scale)
        want = theirs(torch.tensor([prompt])).logits[0, -1]
        for handle in handles:
            handle.remove()
        assert float((logits - want).abs().max() / want.abs().max()) <= 5e-5
    assert float((got[0] - got[1]).abs().max()) > 0.1  # it shows


@pytest.fixture(scope="module")
def adapters(tmp_path_factory) -> list[str]:
    """Folders of three adapters of the tiny model, of different ranks and maps."""
    folder, modules = tmp_path_factory.mktemp("adapters"), modules_of(TINY)
    some = {name: shape for name, shape in modules.items() if "self_attn" in name}
    for seed, (own, rank) in enumerate(((modules, 4), (some, 3), (modules, 1))):
        save_adapter(folder / str(seed), own, seed, size=0.7, r=rank)
    return [str(folder / str(seed)) for seed in range(3)]


@pytest.mark.parametrize(
    "config", [{}, {"dtype": "bfloat16"}, {"quantization": "int8"}], ids=["float32", "bfloat16", "int8"]
)
def test_rows_of_many_adapters_equal_each_alone(config, adapters):
    runner = tiny_runner(deterministic=True, max_loras=3, max_lora_rank=4, **config)
    for index, folder in enumerate(adapters, 1):
        runner.load_adapter(index, folder)
    prompts = [torch.randint(0, 131, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in range(9, 16)]

    def compute(*slots: int) -> list[torch.Tensor]:
        """Logits of two tokens after each slot's prompt; two of the prompts come in two chunks."""
        driver, found = Driver(runner, seed=len(slots)), []
        for slot in slots:
            driver.open(slot, prompts[slot], adapter=slot % 4)
        driver.step(*((slot, 0, 5 if slot < 2 else len(prompts[slot]), int(slot >= 2)) for slot in slots))
        for slot in (slot for slot in slots if slot < 2):
            driver.step((slot, 5, len(prompts[slot]) - 5, 1))
        for _ in range(2):
            driver.step(*((slot, len(prompts[slot]) + len(found), 1, 1) for slot in slots))
            found.append(driver.logits)
        return found

    together = compute(*range(7))
    for slot in range(7):
        for all_rows, alone in zip(together, compute(slot), strict=True):
            assert torch.equal(all_rows[slot], alone[0])


def test_a_load_between_steps_replaces_an_adapter(adapters):
    """All results of index 1 are forgotten, including parts that only the first adapter had."""
    runner, prompt = tiny_runner(max_loras=2, max_lora_rank=4), list(range(20))

    def logits() -> torch.Tensor:
        driver = Driver(runner)
        driver.open(0, prompt, adapter=1)
        return driver.prefill(0, prompt)

    plain = logits()
    found = []
    for folder in (*adapters, adapters[1]):
        runner.load_adapter(1, folder)
        found.append(logits())
    assert torch.equal(found[1], found[3])
    assert all(float((a - b).abs().max()) > 0.01 for a, b in ((plain, found[0]), (found[0], found[1])))


REFUSED = [
    ({"use_dora": True}, "use_dora is True"),
    ({"modules_to_save": ["lm_head"]}, r"modules_to_save is \['lm_head'\]"),
    ({"bias": "all"}, "bias is 'all'"),
    ({"peft_type": "IA3"}, "peft_type is 'IA3'"),
    ({"trainable_token_indices": [3]}, r"trainable_token_indices is \[3\]"),
    ({"init_lora_weights": "pissa_niter_4"}, "changes the model's own weights"),
    ({"r": 3}, "ranks 4 and 4, where adapter_config.json says 3"),
    ({"rank_pattern": {"q_proj": 2}}, "of model.layers.0.self_attn.q_proj have ranks 4 and 4, where .* says 2"),
    ({"alpha_pattern": {"(": 2}}, "alpha_pattern has '\\('"),
    ({"lora_alpha": None}, "lora_alpha of .* is None"),
]


@pytest.mark.parametrize(("config", "said"), REFUSED)
def test_configs_that_are_refused(config, said, tmp_path, adapters):
    folder = shutil.copytree(adapters[0], tmp_path / "a")
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    with pytest.raises(CallboardError, match=said) as error:
        read_adapter(folder)
    assert "\n" not in str(error.value)


def test_tensors_that_are_refused(tmp_path, adapters):
    runner = tiny_runner(max_loras=1, max_lora_rank=4)
    good = load_file(Path(adapters[0]) / "adapter_model.safetensors")
    name, embedding = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight", "lora_embedding_A"
    foreign = {key.replace("layers.1.", "layers.7."): tensor for key, tensor in good.items()}
    cases = [
        (
            good | {f"base_model.model.model.embed_tokens.{embedding}": torch.zeros(4, 131)},
            "embed_tokens.lora_embedding",
        ),
        (good | {f"{name}_magnitude": torch.zeros(4)}, "lora_A.weight_magnitude, which is none of"),
        ({key: tensor for key, tensor in good.items() if key != name}, "has lora_B of model.layers.0.self_attn.q_proj"),
        (good | {name: torch.zeros(4, 47)}, "are for 47 inputs and 96 outputs, and this model's map has 48 and 96"),
        (good | {name: good[name].double()}, "is F64 of shape"),
        (foreign, "has matrices for model.layers.7"),
        ({}, "has no tensors"),
    ]
    for i, (tensors, said) in enumerate(cases):
        folder = shutil.copytree(adapters[0], tmp_path / str(i))
        save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, folder / "adapter_model.safetensors")
        with pytest.raises(CallboardError, match=said):
            runner.load_adapter(1, str(folder))
    damaged = folder / "adapter_model.safetensors"
    for data in (b"", b"\xff" * 9, (Path(adapters[0]) / damaged.name).read_bytes()[:-1]):
        damaged.write_bytes(data)
        with pytest.raises(CallboardError, match="damaged or cut off"):
            read_adapter(folder)
    damaged.rename(folder / "adapter_model.bin")
    with pytest.raises(CallboardError, match=r"save the adapter as safetensors .*pickles"):
        read_adapter(folder)
    with pytest.raises(CallboardError, match=r"has no adapter_config\.json"):
        read_adapter(tmp_path)
    with pytest.raises(CallboardError, match="has rank 4; start with max_lora_rank 4 or more"):
        read_adapter(adapters[0]).check_rank(3)
    with pytest.raises(CallboardError, match=r"room for adapters 1 to 1 \(max_loras\), not for 2"):
        runner.load_adapter(2, adapters[0])
    with pytest.raises(CallboardError, match="with rank_invariant it must be 0"):
        tiny_runner(rank_invariant=True, max_loras=1)


def test_without_max_loras_adapters_cost_nothing():
    assert tiny_runner().decoder.adapters is None


def test_digests_cover_the_whole_folder(tmp_path, adapters):
    copied = shutil.copytree(adapters[0], tmp_path / "same")
    digests = [read_adapter(folder).digest for folder in (*adapters, copied)]
    path = copied / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"lora_alpha": 9}))
    digests.append(read_adapter(copied).digest)
    assert digests[3] == digests[0]
    assert len(set(digests)) == 4
