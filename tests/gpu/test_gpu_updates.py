"""Updates of a runner on a GPU: graphs that were captured before give the tokens of the new weights."""

from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.library.make_random_model import write_folder
from runtime.assembly.engine import build_engine
from runtime.assembly.runner import build_runner
from runtime.base.config import EngineConfig
from runtime.base.types import Request, SamplingParams
from runtime.base.weight_parts import ArraysPart, FilesPart
from runtime.core.executor import InProcess
from runtime.models import load_spec
from runtime.models.weights import random_parameter
from runtime.updates.in_place import tensors_of
from runtime.worker.runner import ModelRunner
from runtime.worker.sources import CheckpointSource
from tests.support.models.weight_updates import tensors_in, update

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 512, "intermediate_size": 1536,
    "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64, "vocab_size": 4003,
    "max_position_embeddings": 1024, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": True,
    "bos_token_id": 1, "eos_token_id": 0, "torch_dtype": "bfloat16",
}  # fmt: skip
MIXTRAL = LLAMA | {
    "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2,
    "tie_word_embeddings": False,
}  # fmt: skip


def write(folder: Path, config: dict, seed: int) -> Path:
    shapes, generator = load_spec(config)[0].shapes(), torch.Generator().manual_seed(seed)
    write_folder(folder, config, lambda name: random_parameter(name, shapes[name], generator))
    return folder


def start(folder: Path, **config) -> ModelRunner:
    settings = {"device": "cuda", "dtype": "bfloat16", "num_kv_blocks": 2000, "max_num_seqs": 8, "max_model_len": 256}
    return build_runner(EngineConfig(**settings | {"deterministic": True} | config), CheckpointSource(folder))


def tokens_of(runner: ModelRunner) -> list[list[int]]:
    """Answers to prompts of many lengths. Graphs compute most steps."""
    runner.reset()
    core = build_engine(runner.config, runner.info, InProcess(runner))
    rng, answers = np.random.default_rng(0), [[] for _ in range(12)]
    for i, answer in enumerate(answers):
        prompt = rng.integers(0, 4003, 5 + 17 * i % 90).tolist()
        core.add(Request(str(i), prompt, len(prompt), SamplingParams(max_tokens=24, ignore_eos=True), seed=i), answer)
    while core.has_work:
        output = core.step()
        for state, token in zip(output.states, output.token_ids, strict=True) if output is not None else ():
            state.owner.append(token)
    return answers


def addresses(runner: ModelRunner) -> list[int]:
    decoder = runner.decoder
    return [x.data_ptr() for x in tensors_of([decoder.layers, decoder.embed, decoder.head, decoder.final_norm])]


@pytest.mark.parametrize(
    ("config", "settings"),
    [
        (LLAMA, {}), (LLAMA, {"quantization": "fp8"}), (LLAMA, {"quantization": "fp8", "deterministic": False}),
        (LLAMA, {"quantization": "int4"}), (LLAMA, {"cuda_graphs": False}), (MIXTRAL, {}),
        (MIXTRAL, {"quantization": "int4"}),
    ],
)  # fmt: skip
def test_captured_graphs_compute_with_new_weights(config, settings, tmp_path):
    first, second = write(tmp_path / "first", config, 0), write(tmp_path / "second", config, 1)
    want = tokens_of(start(second, **settings))
    runner = start(first, weight_updates=True, weight_store=str(tmp_path / "store"), **settings)
    before, places = tokens_of(runner), addresses(runner)
    tensors = tensors_in(second)
    names = list(tensors)
    for i in range(3):  # from memory of the host, of the device, and of files
        own = {name: tensors[name] for name in names[i::3]}
        part = ArraysPart({name: tensor.cuda() for name, tensor in own.items()} if i == 1 else own)
        runner.updates.receive(part if i < 2 else FilesPart([str(second)]))
    assert tokens_of(runner) == before
    update(runner, [])
    assert tokens_of(runner) == want
    assert addresses(runner) == places
    runner.updates.store()
    restarted = start(first, weight_updates=True, weight_store=str(tmp_path / "store"), **settings)
    assert tokens_of(restarted) == want
    assert restarted.info.fingerprint == runner.info.fingerprint


def test_sleep_keeps_the_weights_of_an_update(tmp_path):
    first, second = write(tmp_path / "first", LLAMA, 0), write(tmp_path / "second", LLAMA, 1)
    want, runner = tokens_of(start(second)), start(first, weight_updates=True, sleep_mode=True)
    for _ in range(2):  # the host has a copy of the weights from the first sleep
        runner.sleep()
        runner.wake()
    update(runner, [FilesPart([str(second)])])
    for _ in range(2):
        assert tokens_of(runner) == want
        runner.sleep()
        runner.wake()
    assert tokens_of(runner) == want
    runner.sleep()


def test_tensors_wait_on_the_host_without_room(tmp_path, monkeypatch):
    first, second = write(tmp_path / "first", LLAMA, 0), write(tmp_path / "second", LLAMA, 1)
    want, runner = tokens_of(start(second)), start(first, weight_updates=True)
    memory = runner.updates._memory
    memory._room = 1 << 20
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (0, 0))
    update(runner, [FilesPart([str(second)])])
    monkeypatch.undo()
    assert memory._used <= 1 << 20
    assert tokens_of(runner) == want


def test_the_plan_has_room_for_a_second_copy(tmp_path):
    folder = write(tmp_path / "model", LLAMA, 0)
    plan = start(folder, weight_updates=True).memory
    assert plan.updates > plan.weights
    assert "new weights" in str(plan)
