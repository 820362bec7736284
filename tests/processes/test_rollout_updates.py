"""RolloutClient changes the weights of real engines, from everything that a trainer may have."""

import asyncio
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import ray
import torch
from safetensors.torch import load_file

from actors.client import RolloutClient, put_weights, weight_list, weight_slices
from actors.client.engines import RolloutGroup
from actors.client.loop_thread import LoopThread
from actors.ray.directory import RayDirectory
from benchmarks.library.make_random_model import write_folder
from runtime.base.types import CallboardError, SamplingParams
from runtime.llm import LLM
from tests.support.processes.server import Server

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 2048,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",  # which numpy lacks
    "bos_token_id": 1,
    "eos_token_id": 2,
}
PROMPTS = [[5, 6, 7], [100, 200, 300, 400], [9] * 40]
PARAMS = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)


class Trainer:
    """An actor with weights."""

    def __init__(self, folder):
        self.tensors, self.slices = load_file(Path(folder, "model-00001-of-00001.safetensors")), []

    def weight_list(self):
        return weight_list(self.tensors)

    def weights(self, slices):
        self.slices += slices
        return weight_slices(self.tensors, slices)

    @ray.method(tensor_transport="gloo")
    def weights_by_gloo(self, slices):
        return weight_slices(self.tensors, slices)

    def put(self):
        return put_weights(self.tensors)

    def sizes(self):
        """Return the largest part of a tensor that was requested, and the whole tensor's size, by name."""
        sizes = {}
        for name, dim, start, stop in self.slices:
            whole = self.tensors[name].numel()
            part = whole if dim is None else whole // self.tensors[name].shape[dim] * (stop - start)
            sizes[name] = max(part, sizes.get(name, (0, 0))[0]), whole
        return sizes

    def end(self, slices):
        raise SystemExit


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Two checkpoints of one shape."""
    found = []
    for seed in (0, 1):
        generator = torch.Generator().manual_seed(seed)
        shapes = {}
        folder = tmp_path_factory.mktemp("model")

        def read(name, shapes=shapes, generator=generator):
            shape = shapes.setdefault("all", _shapes())[name]
            return torch.ones(shape) if len(shape) == 1 else 0.2 * torch.randn(shape, generator=generator)

        write_folder(folder, CONFIG, read)
        found.append(folder)
    return found


def _shapes():
    from runtime.models import load_spec

    return load_spec(CONFIG)[0].shapes()


@pytest.fixture(scope="module")
def expected(folders):
    """The tokens of each checkpoint when it is loaded."""
    return [
        [
            answer.token_ids
            for answer in LLM(str(folder), deterministic=True, kv_cache_memory=0.1, num_threads=1).generate(
                PROMPTS, PARAMS
            )
        ]
        for folder in folders
    ]


@asynccontextmanager
async def client_of(folder, name, **config):
    """A server, and a client in threads of their own."""
    thread = LoopThread(name)

    async def start():
        group = RolloutGroup(RayDirectory(f"{name}#"))
        await group.start()
        return group

    async with Server(name, folder, weight_updates=True, quantization="none", **config):
        with RolloutClient(await asyncio.to_thread(thread.call, start()), thread) as client:
            yield client


def tokens_of(client):
    return [rollout.token_ids for rollout in client.generate_list(PROMPTS, PARAMS)]


def check_scores(client):
    """Scores of whole rollouts have the bits of the log-probabilities that they were sampled with."""
    params = SamplingParams(max_tokens=30, ignore_eos=True, temperature=0.7, logprobs=0, sampling_logprobs=True)
    found = client.generate_list(PROMPTS, params, n=2, seeds=3)
    scores = client.score([r.prompt_token_ids + r.token_ids for r in found], [len(r.prompt_token_ids) for r in found])
    for rollout, scored in zip(found, scores, strict=True):
        assert scored[-30:] == [entry.logprob for entry in rollout.logprobs]
        assert len(rollout.sampling_logprobs) == 30
        assert rollout.sampling_logprobs != scored[-30:]


@pytest.mark.parametrize("num_ranks", [1, 2])
async def test_weights_come_from_all_that_trainers_have(ray_session, folders, expected, num_ranks):
    trainers = [ray.remote(Trainer).options(num_cpus=0).remote(str(folder)) for folder in folders]

    def check(client):
        assert tokens_of(client) == expected[0]
        state = [load_file(folder / "model-00001-of-00001.safetensors") for folder in folders]
        sources = [
            ("a state dict", 1, state[1]),
            ("an object", 0, ray.put(state[0])),
            ("objects", 1, ray.get(trainers[1].put.remote())),
            ("a folder", 0, folders[0]),
            ("an actor", 1, trainers[1]),
        ]
        for number, (name, which, source) in enumerate(sources, 1):
            assert client.update_weights(source) == str(number)
            assert tokens_of(client) == expected[which], name
        check_scores(client)
        for part, whole in ray.get(trainers[1].sizes.remote()).values():
            assert part in (whole, whole // num_ranks)
        with pytest.raises(CallboardError, match="has tensor_transport='GLOO'"):
            client.update_weights(trainers[0], method="weights_by_gloo")
        with pytest.raises(CallboardError, match="tensors cannot be read"):
            client.update_weights(trainers[0], method="end")
        assert client.update_weights({"model.norm.weight": state[1]["model.norm.weight"]}) == str(len(sources) + 1)
        assert tokens_of(client) == expected[1]

    name = f"updates-{num_ranks}"
    async with client_of(folders[0], name, tensor_parallel_size=num_ranks) as client:
        await asyncio.to_thread(check, client)
    for trainer in trainers:
        ray.kill(trainer)
