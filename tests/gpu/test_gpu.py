"""The same runner on a GPU: its fp32 tokens are the CPU's, and every kernel's compiled form agrees with its twin."""

import gc

import numpy as np
import pytest
import torch

from runtime.assembly.engine import build_engine
from runtime.assembly.runner import build_runner
from runtime.base.config import EngineConfig
from runtime.base.types import Request, SamplingParams
from runtime.core.executor import InProcess
from runtime.llm import LLM
from runtime.worker.gpu.step_kernels import StepKernels
from runtime.worker.sources import DummySource
from tests.support.models.specs import dense_spec

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")

SPEC = dense_spec(
    num_layers=4, hidden_size=256, num_heads=8, num_kv_heads=2, head_dim=64, ffn_size=512, vocab_size=4099,
    max_positions=1024, norm_eps=1e-5,
)  # fmt: skip


def generate(device: str, **config) -> list[list[int]]:
    """Twelve requests of mixed lengths and sampling, through the whole engine core."""
    settings = {"device": device, "num_kv_blocks": 300, "max_num_seqs": 8, "max_model_len": 512, "dtype": "float32"}
    runner = build_runner(EngineConfig(**settings | config), DummySource(SPEC))
    core = build_engine(runner.config, runner.info, InProcess(runner))
    rng = np.random.default_rng(0)
    tokens: dict[str, list[int]] = {}
    for i in range(12):
        prompt = rng.integers(0, SPEC.vocab_size, 5 + 37 * i % 300).tolist()
        params = SamplingParams(
            max_tokens=48,
            temperature=0.9 * (i % 2),
            top_p=0.95 if i % 3 else 1.0,
            repetition_penalty=1.2 if i % 4 > 1 else 1.0,
            frequency_penalty=0.1 * (i % 5),
            ignore_eos=True,
        )
        core.add(Request(str(i), prompt, len(prompt), params, seed=i))
        tokens[str(i)] = []
    while core.has_work:
        if (output := core.step()) is not None:
            for state, token in zip(output.states, output.token_ids, strict=True):
                tokens[state.request.request_id].append(token)
    return list(tokens.values())


def test_fp32_tokens_equal_the_cpus():
    on_cpu, on_gpu = generate("cpu"), generate("cuda")
    same = [a == b for a, b in zip(on_cpu, on_gpu, strict=True)]
    # Two devices round differently, and a near tie may fall either way; random weights have few.
    assert sum(same) >= 11, [next(i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y) for a, b in
                             zip(on_cpu, on_gpu, strict=True) if a != b]  # fmt: skip


def test_garbage_with_graphs_is_not_freed_during_a_capture(monkeypatch):
    """An earlier runner may leave such garbage; a capture is invalid if a graph is freed within it."""
    graphs, decode = [], StepKernels.decode
    for _ in range(3):
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1]):
            torch.zeros(4, device="cuda").add_(1)

    def leave_garbage(*args):
        if torch.cuda.is_current_stream_capturing() and graphs:
            cycle = [graphs.pop()]
            cycle.append(cycle)
        return decode(*args)

    monkeypatch.setattr(StepKernels, "decode", leave_garbage)
    thresholds = gc.get_threshold()
    gc.set_threshold(1, 1, 1)
    try:
        generate("cuda")
    finally:
        gc.set_threshold(*thresholds)
    assert not graphs


def test_torch_and_triton_backends_agree_on_the_gpu():
    a, b = generate("cuda", kernel_backend="torch"), generate("cuda", kernel_backend="triton")
    assert sum(x == y for x, y in zip(a, b, strict=True)) >= 11


def test_smollm2_writes_the_texts_of_the_cpu(smollm2_path):
    prompts = [
        "The capital of France is", "def fibonacci(n):", "Once upon a time, there was a little robot who",
        "Water boils at", "The three primary colours are", "To make a good cup of tea, first",
    ]  # fmt: skip
    params = SamplingParams(max_tokens=64, temperature=0.0)
    settings = {"dtype": "float32", "max_model_len": 512, "num_kv_blocks": 400}
    texts = [
        [answer.text for answer in LLM(str(smollm2_path), device=device, **settings).generate(prompts, params)]
        for device in ("cpu", "cuda")
    ]
    assert texts[0] == texts[1]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_toggles_do_not_change_deterministic_tokens(dtype):
    exact = {"deterministic": True, "dtype": dtype}
    want = generate("cuda", **exact)
    toggles = [{"cuda_graphs": False}, {"pipeline_depth": 1}, {"prefix_cache": False}, {"max_num_batched_tokens": 32}]
    toggles += [{"prefill_graph_tokens": 0}, {"prefill_graph_tokens": 100}]
    for toggle in [*toggles, {"max_num_seqs": 3}, {"block_size": 32, "num_kv_blocks": 150}]:
        assert generate("cuda", **exact | toggle) == want, toggle


def test_bf16_runs_and_stays_within_the_vocabulary():
    tokens = generate("cuda", dtype="bfloat16")
    assert [len(t) for t in tokens] == [48] * 12
    assert all(0 <= i < SPEC.vocab_size for t in tokens for i in t)
