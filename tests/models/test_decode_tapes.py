"""A decode step on a CPU is one tape of kernels for every family but GPT-2: torch computes nothing in it."""

import copy

import pytest

from runtime.assembly.engine import build_engine
from runtime.assembly.runner import build_runner
from runtime.base.config import EngineConfig
from runtime.base.model.decoder_spec import DecoderSpec
from runtime.base.types import Request, SamplingParams
from runtime.core.executor import InProcess
from runtime.kernels.cpu_support import obstacle
from runtime.models import load_spec
from runtime.models.published import PUBLISHED
from runtime.worker.runner import ModelRunner
from runtime.worker.sources import DummySource

SMALL = {
    "hidden_size": 256, "intermediate_size": 256, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64,
    "vocab_size": 1024, "vocab_size_per_layer_input": 1024, "num_hidden_layers": 6, "num_experts": 16,
    "n_routed_experts": 16, "num_local_experts": 16, "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 32,
    "q_lora_rank": 64, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "block_ff_dim": 256,
}  # fmt: skip


def small_spec(name: str) -> DecoderSpec:
    """A published shape with fewer and smaller layers."""
    config = copy.deepcopy(PUBLISHED[name])
    config.pop("quantization_config", None)
    text = config.get("text_config", config)
    text |= {field: value for field, value in SMALL.items() if text.get(field)}
    if text.get("n_group", 1) > 1:
        text |= {"n_group": 4, "topk_group": 2}
    if name == "deepseek-v3":
        text["num_attention_heads"] = text["num_key_value_heads"] = 8
    if name.startswith("gemma-4-e"):  # the last two layers share the keys of a sliding and a full layer
        text |= {"vocab_size_per_layer_input": text["vocab_size"], "num_hidden_layers": 8}
    num_layers = text["num_hidden_layers"]
    text |= {field: text[field][:num_layers] for field in ("layer_types", "mlp_layer_types") if field in text}
    return load_spec(config)[0]


@pytest.mark.one_in(3)
@pytest.mark.skipif(obstacle() != "", reason=obstacle())
@pytest.mark.parametrize(
    ("name", "quantization"),
    [
        *((name, "none") for name in (
            "llama-3.2-1b", "qwen3-0.6b", "qwen3.6-35b-a3b", "lfm2-1.2b", "glm-4.5-air", "deepseek-v2-lite",
            "deepseek-v3", "mixtral-8x7b", "olmoe-1b-7b", "gemma-2-2b", "gemma-3-1b", "gemma-4-e2b", "gemma-4-31b",
        )),
        *((name, "int4") for name in (
            "qwen3-30b-a3b", "gpt-oss-20b", "glm-4.7-flash", "gemma-4-26b-a4b", "gemma-4-e2b",
        )),
    ],
)  # fmt: skip
def test_a_decode_step_is_one_tape(name, quantization):
    """And it gives the tokens of steps that are launched call by call."""
    config = EngineConfig(
        device="cpu", num_threads=2, max_model_len=64, num_kv_blocks=40, max_num_seqs=2, quantization=quantization
    )
    runner = build_runner(config, DummySource(small_spec(name)))
    with_tapes = answers(runner)
    assert runner.steps.tapes.sizes == [2]
    runner.steps.tapes.takes = lambda num_rows: False
    assert answers(runner) == with_tapes


def answers(runner: ModelRunner) -> dict[str, list[int]]:
    """The tokens of two requests."""
    core = build_engine(runner.config, runner.info, InProcess(runner))
    found: dict[str, list[int]] = {"a": [], "b": []}
    for name in found:
        prompt = list(range(3 + ord(name) % 2, 15))
        core.add(Request(name, prompt, len(prompt), SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)))
    while core.has_work:
        if (output := core.step()) is not None:
            for state, token in zip(output.states, output.token_ids, strict=True):
                found[state.request.request_id].append(int(token))
    return found
