"""A model learns by reinforcement: a trainer and a Callboard application in one Ray, on two CPU cores.

    pip install transformers        # the trainer's model; Callboard itself does not need it
    python docs/rollouts.py         # 60 steps in less than a minute

A tiny model with random weights answers at random. The reward is the share of its six characters that fit a number
plate: three capitals, then three digits. GRPO needs nothing else: each answer is compared with the other answers to the
same prompt. While the trainer learns from a batch, the engine already makes the next one. New weights reach the running
answers between two steps. Importance ratios correct for that: a rollout has the probability of each token as drawn.
"""

import argparse
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from actors.ray.environment import single_machine

# A private Ray: it reads its environment when it is imported. The folder has its files and the model.
os.environ.update(single_machine(folder := tempfile.mkdtemp(prefix="cb-", dir="/tmp")))

import ray
import torch
from ray import serve
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, logging

from actors.client import Rollout, put_weights
from callboard import RolloutClient, SamplingParams
from callboard.app import AppArgs, build_app

FORMAT = [str.isupper] * 3 + [str.isdigit] * 3
PARAMS = SamplingParams(max_tokens=len(FORMAT), ignore_eos=True, logprobs=0, sampling_logprobs=True)
NUM_PROMPTS, GROUP = 8, 16  # prompts a step, answers to each
CLIP, LEARNING_RATE = 0.2, 1e-2


def save_tiny_model(folder: str, seed: int) -> Tokenizer:
    """Write a Llama of 115,000 random weights, and a tokenizer with a token for each byte."""
    torch.manual_seed(seed)
    logging.disable_progress_bar()
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=257, eos_token_id=256, bos_token_id=256, tie_word_embeddings=False, **shape)
    LlamaForCausalLM(config).save_pretrained(folder)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({char: i for i, char in enumerate([*alphabet, "<end>"])}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(Path(folder, "tokenizer.json")))
    return tokenizer


def reward(rollout: Rollout, tokenizer: Tokenizer) -> float:
    """The share of the tokens that are in the format."""
    texts = [tokenizer.decode([token]) for token in rollout.token_ids]
    fits = [fit(text) and text.isascii() for fit, text in zip(FORMAT, texts, strict=False)]
    return sum(fits) / len(FORMAT)


@ray.remote
class Trainer:
    """The model with its optimizer, in a process of its own."""

    def __init__(self, folder: str) -> None:
        torch.set_num_threads(1)
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.optimizer = torch.optim.Adam(self.model.parameters(), LEARNING_RATE)

    def learn(self, groups: list[list[Rollout]], rewards: list[list[float]]) -> list[ray.ObjectRef]:
        """Take one step of GRPO, and return the new weights as objects of Ray."""
        loss = torch.zeros(())
        for group, of_group in zip(groups, torch.tensor(rewards), strict=True):
            advantages = (of_group - of_group.mean()) / (of_group.std() + 1e-4)
            tokens = torch.tensor([r.prompt_token_ids + r.token_ids for r in group])
            drawn = torch.tensor([r.sampling_logprobs for r in group])
            length = drawn.shape[1]
            logits = self.model(tokens[:, :-1]).logits[:, -length:]
            logprobs = logits.log_softmax(-1).gather(2, tokens[:, -length:, None])[..., 0]
            ratios = (logprobs - drawn).exp()
            clipped = ratios.clamp(1 - CLIP, 1 + CLIP)
            gains = torch.minimum(ratios * advantages[:, None], clipped * advantages[:, None])
            loss -= gains.mean() / len(groups)
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return put_weights(self.model.state_dict())


def start_engine(folder: str) -> RolloutClient:
    """Serve the model in this Ray, without HTTP, and connect."""
    serve.start(proxy_location="Disabled", http_options={"host": "127.0.0.1"})
    settings = {"weight_updates": True, "quantization": "none", "num_threads": 1}
    settings |= {"kv_cache_memory": 0.1, "kv_tier_memory": 0}  # new weights make a tier useless
    serve.run(build_app(AppArgs(model=folder, num_fronts=1, **settings)), name="rollouts")
    return RolloutClient.connect("rollouts")


def train(client: RolloutClient, trainer: "ray.actor.ActorHandle", tokenizer: Tokenizer, steps: int, seed: int) -> None:
    """Take some steps, and print the mean reward of each."""
    prompts = [tokenizer.encode(f"Car {i} has the plate ").ids for i in range(NUM_PROMPTS)]

    def start_batch(step: int) -> Iterator[Rollout]:
        return client.generate(prompts, PARAMS, n=GROUP, seeds=seed + step)

    start, batch = time.monotonic(), start_batch(0)
    for step in range(steps):
        groups: list[list[Rollout]] = [[] for _ in prompts]
        for rollout in batch:
            groups[rollout.index].append(rollout)
        batch = start_batch(step + 1)  # the engine works while the trainer learns
        rewards = [[reward(rollout, tokenizer) for rollout in group] for group in groups]
        weights = ray.get(trainer.learn.remote(groups, rewards))
        version = client.update_weights(weights, version=step + 1, kv="keep")
        mean = sum(map(sum, rewards)) / NUM_PROMPTS / GROUP
        used = sorted({int(name) for g in groups for r in g for _, name in r.weight_versions if name.isdecimal()})
        sample = tokenizer.decode(groups[0][0].token_ids)
        print(f"step {step:3}  {time.monotonic() - start:5.1f} s  reward {mean:.3f}  ", end="")
        print(f"weights {used} -> {version}  {sample!r}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0, help="of the weights and of the answers")
    args = parser.parse_args()
    tokenizer = save_tiny_model(folder, args.seed)
    ray.init("local", num_cpus=4, include_dashboard=False, log_to_driver=False, _temp_dir=folder)
    with start_engine(folder) as client:
        train(client, Trainer.remote(folder), tokenizer, args.steps, args.seed << 20)
    ray.shutdown()
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
