"""Vectors of prompts on a GPU: in graphs of steps with prompts, in several, launched; bits of deterministic mode."""

import numpy as np
import pytest
import torch

from runtime.assembly.engine import build_engine
from runtime.base.types import Request, SamplingParams
from runtime.core.executor import InProcess
from tests.gpu.test_gpu_prefill_graphs import SPECS, VOCAB
from tests.support.models.runner_driver import tiny_runner

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")

POOLED = SamplingParams(max_tokens=1, temperature=0.0, pooled=True)
LENGTHS = (1, 2, 63, 64, 65, 511, 513, 1100, 1500, 17)


def vectors(pooling: str, **config) -> list[np.ndarray]:
    """Vectors of prompts of these lengths beside a decode row, in one batch."""
    runner = tiny_runner(SPECS["llama-3.2-1b"], pooling=pooling, max_model_len=2048, num_kv_blocks=4000, **config)
    core = build_engine(runner.config, runner.info, InProcess(runner))
    rng, found = np.random.default_rng(1), {}
    core.add(Request("text", [5, 6, 7], 3, SamplingParams(max_tokens=40, ignore_eos=True)))
    for length in LENGTHS:
        core.add(Request(str(length), rng.integers(0, VOCAB, length).tolist(), length, POOLED))
    while core.has_work:
        if (output := core.step()) is not None:
            found |= {state.request.request_id: np.frombuffer(v.numbers, np.float32) for state, v in output.reports}
    return [found[str(length)] for length in LENGTHS]


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))


@pytest.mark.gpu
@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_vectors_equal_those_of_the_cpu(pooling):
    want = vectors(pooling, device="cpu", dtype="float32", max_num_batched_tokens=2048)
    for config in (
        {"dtype": "float32"},
        {"dtype": "bfloat16"},
        {"dtype": "bfloat16", "cuda_graphs": False},
        {"dtype": "bfloat16", "max_num_batched_tokens": 600, "prefill_graph_tokens": 256},
    ):
        least = 0.9999 if config["dtype"] == "float32" else 0.995
        found = vectors(pooling, device="cuda", **{"max_num_batched_tokens": 4096} | config)
        assert min(map(cosine, found, want)) > least, config


@pytest.mark.gpu
@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_bits_of_deterministic_mode(pooling):
    common = {"device": "cuda", "dtype": "bfloat16", "deterministic": True}
    want = vectors(pooling, **common, max_num_batched_tokens=4096)
    for config in (
        {"cuda_graphs": False, "max_num_batched_tokens": 4096},
        {"max_num_batched_tokens": 130, "prefill_graph_tokens": 64},
        {"max_num_batched_tokens": 2048, "max_num_seqs": 3, "pipeline_depth": 1},
    ):
        for a, b in zip(vectors(pooling, **common | config), want, strict=True):
            assert np.array_equal(a, b), config
