"""Images on a GPU: encoders against the CPU, and the same tokens whatever the batch, the pool and the graphs."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch

from benchmarks.library.models import tower_of
from runtime.base.images import Image
from runtime.base.model.tower_spec import TowerSpec
from runtime.kernels.numerics import Numerics
from runtime.models.towers.tower import Tower
from runtime.models.towers.tower_tensors import ReadParameter, draw
from tests.models.test_images_of_requests import REQUESTS, Answers, answers, core_of, num_encoded

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]
CPU = Numerics(torch.float32, torch.device("cpu"), "torch", packed=False, deterministic=False)
CUDA = {"device": "cuda", "kernel_backend": "triton", "dtype": "bfloat16"}
SIZES = (64, 96), (256, 192)


def spec_of(name: str) -> TowerSpec:
    """Two layers of a published encoder."""
    spec = tower_of(name)
    assert spec is not None
    return replace(spec, num_layers=2, deepstack=spec.deepstack and (0, 1, 1)[: len(spec.deepstack)])


class Moved:
    """Parameters that are drawn on the CPU, in another place and type."""

    def __init__(self, read: ReadParameter, device: str, dtype: torch.dtype) -> None:
        self._read, self._device, self._dtype = read, device, dtype

    def __call__(self, parameter: str, /) -> torch.Tensor:
        return self._read(parameter).to(self._device, self._dtype)

    def limits(self, name: str) -> tuple[float, ...]:
        return self._read.limits(name)


@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 2e-3), (torch.bfloat16, 0.04)], ids=str)
@pytest.mark.parametrize("name", ["qwen3-vl-8b", "smolvlm-256m"])
def test_embeddings_are_near_those_of_a_cpu(name, dtype, most):
    spec = spec_of(name)
    on_cpu = Tower(spec, CPU, draw(spec, CPU, 0))
    numerics = replace(CPU, device=torch.device("cuda"), dtype=dtype, backend="triton")
    on_gpu = Tower(spec, numerics, Moved(draw(spec, CPU, 0), "cuda", dtype))
    for height, width in SIZES if name.startswith("qwen") else ((512, 512),):
        pixels = np.random.default_rng(height).integers(0, 256, (height, width, 3), np.uint8).tobytes()
        image = Image(bytes(16), ((height, width),), pixels)
        wanted, found = on_cpu.encode(image), on_gpu.encode(image, lambda data: torch.from_numpy(data).cuda())
        assert found.shape == wanted.shape
        assert float((found.float().cpu() - wanted).norm() / wanted.norm()) < most


@cache
def alone() -> Answers:
    found: Answers = {}
    for request in REQUESTS:
        found |= answers(core_of(**CUDA), [request])
    return found


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"cuda_graphs": False},
        {"max_num_batched_tokens": 9},
        {"num_kv_blocks": 24, "prefix_cache": False, "image_pool_tokens": 33, "max_image_tokens": 24},
    ],
    ids=str,
)
def test_policies_do_not_show(config):
    core = core_of(**CUDA, **config)
    assert answers(core) == alone()
    assert num_encoded(core) >= 8
    assert answers(core) == alone(), "images from the pool, and prompts from the prefix cache"


def test_images_are_encoded_again_after_a_loss():
    assert answers(core_of(**CUDA), lost_after=4) == alone()
