"""Updates of the Triton path: new weights at the addresses of the old ones, which graphs hold."""

from collections.abc import Iterator
from unittest import mock

import pytest
import torch

from runtime.base.weight_parts import ArraysPart
from runtime.updates.in_place import tensors_of
from runtime.worker.runner import ModelRunner
from tests.support.models import quantized_models
from tests.support.models.family_cases import save_model, spec_of
from tests.support.models.quantized import FORMATS
from tests.support.models.runner_driver import open_runner, tiny_runner
from tests.support.models.weight_updates import changed, logits, random_tensors, tensors_in, update, write_changed

pytestmark = pytest.mark.usefixtures("wide_products", "_cold")
SETTINGS = {
    "kernel_backend": "triton", "dtype": "float32", "max_model_len": 40, "max_num_seqs": 2, "block_size": 8,
}  # fmt: skip


@pytest.fixture
def _cold() -> Iterator[None]:
    with mock.patch.object(ModelRunner, "_warm_up"):
        yield


def addresses(runner: ModelRunner) -> list[int]:
    decoder = runner.decoder
    return [x.data_ptr() for x in tensors_of([decoder.layers, decoder.embed, decoder.head, decoder.final_norm])]


TWO = {"num_hidden_layers": 2}
CASES = {  # families -> settings that make them shorter
    "llama": TWO, "qwen3": TWO, "mixtral": TWO, "gpt2": {"n_layer": 2}, "glm4 moe": TWO, "deepseek v3": TWO,
    "gemma3": {**TWO, "layer_types": ["sliding_attention", "full_attention"]},
    "qwen3.5": {**TWO, "layer_types": ["linear_attention", "full_attention"]},
    "lfm2": {**TWO, "layer_types": ["conv", "full_attention"]},
    "gpt-oss": {**TWO, "layer_types": ["sliding_attention", "full_attention"]},
}  # fmt: skip


@pytest.mark.one_in(3)
@pytest.mark.parametrize("case", CASES)
def test_new_weights_have_the_old_addresses(case, tmp_path):
    save_model(tmp_path / "first", case, **CASES[case])
    second = changed(tensors_in(tmp_path / "first"))
    folder = write_changed(tmp_path / "first", second, tmp_path / "second")
    runner = open_runner(tmp_path / "first", weight_updates=True, **SETTINGS)
    before = addresses(runner)
    update(runner, [ArraysPart(second)])
    assert addresses(runner) == before
    assert torch.equal(logits(runner), logits(open_runner(folder, **SETTINGS)))


def test_new_sinks_have_the_old_addresses():
    runners = [
        tiny_runner(spec_of("sinks"), weight_updates=True, **SETTINGS | {"kernel_backend": backend})
        for backend in ("triton", "torch")
    ]
    before, tensors = addresses(runners[0]), random_tensors(runners[0])
    for runner in runners:
        update(runner, [ArraysPart(tensors)])
    assert addresses(runners[0]) == before
    got, want = map(logits, runners)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4 * float(want.abs().max()))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("quantization", ["fp8", "int4", "nf4"])
@pytest.mark.parametrize("config", [quantized_models.LLAMA, quantized_models.MIXTRAL])
def test_quantization_at_load_follows_in_place(quantization, config, tmp_path):
    _, first = quantized_models.write(tmp_path, FORMATS["awq"], config | {"num_hidden_layers": 1})
    second = changed(tensors_in(first))
    folder = write_changed(first, second, tmp_path / "second")
    settings = SETTINGS | {"quantization": quantization}
    runner = open_runner(first, weight_updates=True, **settings)
    before = addresses(runner)
    update(runner, [ArraysPart(second)])
    assert addresses(runner) == before
    assert torch.equal(logits(runner), logits(open_runner(folder, **settings)))
