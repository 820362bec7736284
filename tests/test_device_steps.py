"""The Triton path of a whole step, from plan to tokens, under the interpreter: its tokens are the torch path's."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

ENGINE = """
import numpy as np
from runtime.core.config import EngineConfig
from runtime.core.engine import EngineCore
from runtime.core.executor import InProcess
from runtime.core.types import Request, SamplingParams
from runtime.models.spec import DecoderSpec
from runtime.worker.runner import ModelRunner

SPEC = DecoderSpec(
    num_layers=2, hidden_size=96, num_heads=3, num_kv_heads=1, head_dim=64, ffn_size=160, vocab_size=131,
    max_positions=256, norm_eps=1e-5, qk_norm=True,
)
PARAMS = [
    SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True, logprobs=2),
    SamplingParams(max_tokens=4, temperature=0.8, ignore_eos=True),
    SamplingParams(max_tokens=5, temperature=1.2, top_k=9, top_p=0.9, min_p=0.02, ignore_eos=True),
    SamplingParams(max_tokens=6, temperature=0.0, repetition_penalty=1.3, frequency_penalty=0.2, min_tokens=3,
                   stop_token_ids=(5, 6, 7), logit_bias=((3, 2.5),)),
]


def run(backend, **config):
    settings = {"device": "cpu", "kernel_backend": backend, "num_kv_blocks": 24, "max_num_seqs": 3, "num_threads": 1,
                "max_model_len": 96, "max_num_batched_tokens": 24, "dtype": "float32"} | config
    runner = ModelRunner.dummy(EngineConfig(**settings), SPEC)
    core = EngineCore(runner.config, runner.info, InProcess(runner))
    rng = np.random.default_rng(0)
    shared = rng.integers(0, 131, 20).tolist()
    got = {}
    for i, params in enumerate(PARAMS):
        prompt = shared * (i % 2) + rng.integers(0, 131, 3 + 7 * i).tolist()
        core.add(Request(str(i), prompt, len(prompt), params, seed=i))
    while core.has_work:
        if (output := core.step()) is not None:
            for i, (state, token) in enumerate(zip(output.states, output.token_ids, strict=True)):
                found = output.logprobs.get(i)
                top = found and [(token_id, round(value, 3)) for token_id, value in found.top]
                got.setdefault(state.request.request_id, []).append((token, found and found.rank, top))
    return got, core.scheduler.prompt_tokens_cached
"""


def interpreted(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", ENGINE + code], capture_output=True, text=True, cwd=ROOT,
        env=os.environ | {"TRITON_INTERPRET": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("config", ["", "deterministic=True", "pipeline_depth=1, block_size=8, num_kv_blocks=40"])
def test_tokens_are_those_of_the_torch_path(config):
    code = f"a, b = run('torch', {config}), run('triton', {config})\nassert a == b, (a, b)\nprint(a[1])"
    assert int(interpreted(code)) > 0, "the prefix cache took no part"
