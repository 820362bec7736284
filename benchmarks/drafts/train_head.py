"""Trains an EAGLE-3 head on its target's own answers, on a CPU, and writes it as a folder in EAGLE's format.

    python -m benchmarks.drafts.train_head FOLDER [--tokens 24000] [--minutes 15] [--set model=NAME]

The target answers prompts of `acceptance.prompts`, without the held-out ones. A recorder in its runner keeps each
token's features. They stay in FOLDER/texts-SEED.pt.

The head learns the target's distributions at temperature 1 with a loss for draft tokens 1, 2 and 3. Passes 2 and 3 read
the head's own states in place of features (arXiv 2503.01840). The first 40 % of the time has pass 1 alone. Progress is
the mean of sum min(p, q) for each draft token, on texts that are kept out.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch.nn.utils.rnn import pad_sequence

from benchmarks.drafts.acceptance import NUM_DRAFTS, chat, prompts
from benchmarks.library.measure import engine_config
from runtime.base.arrays import Int32s
from runtime.base.model.attention_spec import AttentionSpec
from runtime.base.types import SamplingParams
from runtime.core.plan import NewSlot
from runtime.llm import LLM
from runtime.models.decoder import Decoder
from runtime.models.forward_batch import Taps
from runtime.worker.cpu.slots import Slots
from runtime.worker.extras import StepWork
from runtime.worker.heads.head_rows import tokens_of

TEMPERATURES = (0.5, 0.8, 1.0, 1.0)
_ANSWER_LEN = 96
_KEPT_OUT = 16  # texts that only measure
_WEIGHTS = 1.0, 0.8, 0.6  # each draft token's in the loss
_RATE = 1.5e-3
_FIRST_ALONE = 0.4  # share of the time with pass 1 alone
_LAYER = "midlayer."

Recorded = tuple[torch.Tensor, torch.Tensor]  # a prompt's and its answer's tokens [n] int32, their features float16


class Recorder:
    """Has a head's place in a CPU runner, and keeps the features of all tokens."""

    def __init__(self, llm: LLM, taps: tuple[int, ...]) -> None:
        steps = llm.runner.steps
        self.head, self.steps, self.texts = SimpleNamespace(spec=SimpleNamespace(taps=taps)), steps, list[Recorded]()
        width = len(taps) * steps.decoder.spec.hidden_size
        self.features = torch.zeros((steps.num_slots, steps.max_model_len, width), dtype=torch.float16)
        self.ends = np.zeros(steps.num_slots, np.int64)

    def taps(self, num_tokens: int) -> Taps:
        layers = self.head.spec.taps
        return Taps(layers, torch.empty((num_tokens, self.features.shape[-1]), dtype=self.steps.decoder.numerics.dtype))

    def run(self, work: StepWork, slots: Slots, draft_token_ids: Int32s) -> bool:
        plan = work.plan
        assert work.last is not None, "no graphs run on a CPU"
        assert work.taps is not None, "its steps ask for them"
        rows, positions = tokens_of(plan.num_computed, plan.num_tokens)
        index = torch.from_numpy((work.last - plan.ends + 1)[rows] + positions)
        self.features[plan.slots[rows], positions] = work.taps.out[index].half()
        self.ends[plan.slots] = plan.ends
        return True

    def add(self, new: NewSlot) -> None:
        self.remove(new.slot)

    def remove(self, slot: int) -> None:
        if end := int(self.ends[slot]):
            self.texts.append((self.steps.slots.tokens[slot, :end].clone(), self.features[slot, :end].clone()))
        self.ends[slot] = 0

    def reset(self) -> None:
        self.ends[:] = 0


def record(llm: LLM, taps: tuple[int, ...], path: Path, num_tokens: int, seed: int) -> None:
    """Write answers to prompts, at TEMPERATURES in turn, until they have `num_tokens` tokens."""
    recorder = llm.runner.steps.head = Recorder(llm, taps)
    asked, burst, start = prompts(held_out=False), llm.config.max_num_seqs or 1, time.perf_counter()
    rng, count = np.random.default_rng(seed), 0
    while count < num_tokens:
        texts = [asked[i][1] for i in rng.integers(0, len(asked), burst)]
        params = [
            SamplingParams(max_tokens=_ANSWER_LEN, temperature=TEMPERATURES[i % len(TEMPERATURES)], seed=number)
            for i, number in enumerate(rng.integers(0, 1 << 31, burst).tolist())
        ]
        answers = llm.generate([llm.chat_prompt(chat(text)) for text in texts], params, progress=False)
        for slot in range(burst):
            recorder.remove(slot)
        torch.save(recorder.texts, path)  # complete after every burst
        count += sum(len(answer.token_ids) for answer in answers)
        print(f"# {time.perf_counter() - start:.0f} s: {count} tokens of answers", flush=True)
    llm.runner.steps.head = None


class Trainee:
    """The head's tensors by their names in the folder, and its passes over whole texts."""

    def __init__(self, target: Decoder, num_taps: int, ids: torch.Tensor) -> None:
        mixer = target.spec.layers[-1].mixer
        assert isinstance(mixer, AttentionSpec), "the target's layers have attention"
        self.target, self.mixer, self.eps, self.ids = target, mixer, target.spec.norm_eps, ids
        self.ffn, self.num_taps, hidden = target.spec.layers[-1].ffn.size, num_taps, target.spec.hidden_size
        self.embed = lambda tokens: target.embed_tokens(tokens, 1.0)
        head = target.head.in_float32(torch.eye(hidden, dtype=target.numerics.dtype)).T[ids].contiguous()
        self.frozen = {"lm_head.weight": head}  # the target's rows
        self.target_norm = target.head_norm.float()
        heads, kv = mixer.num_heads * mixer.head_dim, mixer.num_kv_heads * mixer.head_dim
        maps = {"self_attn.q_proj": (heads, 2 * hidden), "self_attn.k_proj": (kv, 2 * hidden),
                "self_attn.v_proj": (kv, 2 * hidden), "self_attn.o_proj": (hidden, heads),
                "mlp.gate_proj": (self.ffn, hidden), "mlp.up_proj": (self.ffn, hidden),
                "mlp.down_proj": (hidden, self.ffn)}  # fmt: skip
        shapes = {f"{_LAYER}{n}.weight": s for n, s in maps.items()}
        generator = torch.Generator().manual_seed(0)
        self.trained = {n: torch.randn(s, generator=generator) * s[1] ** -0.5 for n, s in shapes.items()}
        norms = [f"fc_norm.{i}" for i in range(num_taps)]
        norms += [_LAYER + n for n in ("input_layernorm", "hidden_norm", "post_attention_layernorm")]
        self.trained |= {f"{name}.weight": torch.ones(hidden) for name in norms}
        # At first it predicts what its target predicted one token earlier.
        self.trained["fc.weight"] = torch.cat((torch.zeros(hidden, (num_taps - 1) * hidden), torch.eye(hidden)), 1)
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            self.trained[f"{_LAYER}{name}.weight"] *= 0.1
        self.trained["norm.weight"] = 0.5 * self.target_norm
        for tensor in self.trained.values():
            tensor.requires_grad_()

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return F.rms_norm(x, x.shape[-1:], self.trained[f"{name}.weight"], self.eps)

    def linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return F.linear(x, self.trained[f"{name}.weight"])

    def targets(self, features: torch.Tensor) -> torch.Tensor:
        """[..., ids] the target's probabilities within the draft vocabulary after tokens with these features."""
        final = features[..., -len(self.target_norm) :].float()
        normed = F.rms_norm(final, final.shape[-1:], self.target_norm, self.eps)
        return F.linear(normed, self.frozen["lm_head.weight"]).softmax(-1)

    def log_probs(self, tokens: torch.Tensor, features: torch.Tensor, passes: int) -> list[torch.Tensor]:
        """The distributions [batch, n, ids] of each pass. Entry i takes token i + 1 and predicts token i + 2.

        In pass j an entry has the j-th draft token of a round. It reads pass 1 before the round, and its own round."""
        e = self.norm(self.embed(tokens.flatten()).view(*tokens.shape, -1).float(), f"{_LAYER}input_layernorm")
        taps = [self.norm(tap, f"fc_norm.{i}") for i, tap in enumerate(features.float().chunk(self.num_taps, -1))]
        h, keys, values, found = self.linear(torch.cat(taps, -1), "fc"), [], [], []
        for number in range(passes):
            both = torch.cat((e, self.norm(h, f"{_LAYER}hidden_norm")), -1)
            q, k, v = (self.heads(both, part) for part in "qkv")
            keys.append(k)
            values.append(v)
            x = h + self.linear(self.mixed(q, keys, values, number), f"{_LAYER}self_attn.o_proj")
            y = self.norm(x, f"{_LAYER}post_attention_layernorm")
            gate, up = (self.linear(y, f"{_LAYER}mlp.{part}_proj") for part in ("gate", "up"))
            x = x + self.linear(F.silu(gate) * up, f"{_LAYER}mlp.down_proj")
            found.append(F.linear(self.norm(x, "norm"), self.frozen["lm_head.weight"]).log_softmax(-1))
            h = F.pad(x, (0, 0, 1, 0))[:, :-1]  # the entry before
        return found

    def heads(self, x: torch.Tensor, part: str) -> torch.Tensor:
        """[batch, heads, n, head_dim] of q, k or v. Entry i is at position i + 1."""
        y = self.linear(x, f"{_LAYER}self_attn.{part}_proj").unflatten(-1, (-1, self.mixer.head_dim)).transpose(1, 2)
        if part != "v":
            half = self.mixer.head_dim // 2
            angles = torch.arange(1, y.shape[2] + 1)[:, None] * self.mixer.rope.theta ** -(torch.arange(half) / half)
            cos, sin = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)
            y = y * cos + torch.cat((-y[..., half:], y[..., :half]), -1) * sin
        return y if part == "q" else y.repeat_interleave(self.mixer.num_heads // self.mixer.num_kv_heads, 1)

    def mixed(self, q: torch.Tensor, keys: list[torch.Tensor], values: list[torch.Tensor], number: int) -> torch.Tensor:
        """[batch, n, heads * head_dim] of attention in pass `number`."""
        q, n = q * self.mixer.head_dim**-0.5, q.shape[2]
        hidden = torch.ones(n, n, dtype=torch.bool).triu(1 - number)
        scores = [(q @ keys[0].transpose(2, 3)).masked_fill(hidden, -torch.inf)]
        later = range(1, number + 1)  # passes of the entry's own round
        scores += [(q * before(keys[i], number - i)).sum(-1, keepdim=True) for i in later]
        weights = torch.cat(scores, -1).softmax(-1)
        mixed = weights[..., :n] @ values[0]
        for i in later:
            mixed = mixed + weights[..., n + i - 1, None] * before(values[i], number - i)
        return mixed.transpose(1, 2).flatten(2)

    def save(self, folder: Path, taps: Sequence[int]) -> None:
        """Write config.json and model.safetensors. `taps` are the target's layers with the inputs that it reads."""
        spec, mixer = self.target.spec, self.mixer
        config = {
            "architectures": ["LlamaForCausalLMEagle3"], "vocab_size": spec.vocab_size,
            "draft_vocab_size": len(self.ids), "hidden_size": spec.hidden_size, "num_hidden_layers": 1,
            "num_attention_heads": mixer.num_heads, "num_key_value_heads": mixer.num_kv_heads,
            "head_dim": mixer.head_dim, "intermediate_size": self.ffn, "rms_norm_eps": self.eps,
            "max_position_embeddings": spec.max_positions, "rope_theta": mixer.rope.theta, "fc_norm": True,
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(taps)},
        }  # fmt: skip
        tensors = {n: t.detach().contiguous() for n, t in {**self.trained, **self.frozen}.items()}
        save_file(tensors | {"d2t": self.ids - torch.arange(len(self.ids))}, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(config, indent=1))


def before(x: torch.Tensor, count: int) -> torch.Tensor:
    """[batch, heads, n, head_dim] moved to `count` entries later."""
    return F.pad(x, (0, 0, count, 0))[:, :, : x.shape[2]]


def choose_ids(target: Decoder, texts: list[Recorded], count: int) -> torch.Tensor:
    """The `count` token ids to which the target gives the most probability in the texts, rising."""
    hidden, mass = target.spec.hidden_size, torch.zeros(target.spec.vocab_size)
    for tokens, features in texts:
        mass += torch.bincount(tokens, minlength=len(mass))
        mass += 8 * target.logits(features[::8, -hidden:].to(target.numerics.dtype)).float().softmax(-1).sum(0)
    return mass.topk(min(count, len(mass))).indices.sort().values


def losses(head: Trainee, batch: Sequence[Recorded], passes: int) -> tuple[torch.Tensor, list[float]]:
    """A batch's loss, and the mean over its tokens of sum min(p, q) in each pass."""
    tokens, features = (pad_sequence(list(parts), batch_first=True) for parts in zip(*batch, strict=True))
    sizes = torch.tensor([len(each) - 1 for each, _ in batch])[:, None]
    with torch.no_grad():
        p = head.targets(features[:, 1:])
    loss, shares, entries = torch.zeros(()), list[float](), torch.arange(tokens.shape[1] - 1)
    for number, log_q in enumerate(head.log_probs(tokens[:, 1:].long(), features[:, :-1], passes)):
        counted = (entries < sizes) & (entries >= number)
        loss = loss - _WEIGHTS[number] * (p * log_q).sum(-1)[counted].mean()
        shares.append(float(torch.minimum(p, log_q.detach().exp()).sum(-1)[counted].mean()))
    return loss, shares


def train(head: Trainee, texts: list[Recorded], seconds: float, batch_size: int) -> None:
    """AdamW for this time; its rate rises at first and then falls to 0. Prints figures of texts that are kept out."""
    kept_out, texts = texts[:_KEPT_OUT], texts[_KEPT_OUT:]
    optimizer = torch.optim.AdamW(head.trained.values(), betas=(0.9, 0.95), weight_decay=0.01)
    rng, order, start, number, shown = np.random.default_rng(0), np.zeros(0, np.int64), time.perf_counter(), 0, 0.0
    while (elapsed := (time.perf_counter() - start) / seconds) < 1.0:
        if len(order) < batch_size:
            order = rng.permutation(len(texts))
        chosen, order = order[:batch_size], order[batch_size:]
        loss, _ = losses(head, [texts[i] for i in chosen], 1 if elapsed < _FIRST_ALONE else NUM_DRAFTS)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(head.trained.values(), 1.0)
        optimizer.param_groups[0]["lr"] = _RATE * min(1.0, (number + 1) / 10, 2.0 * (1.0 - elapsed))
        optimizer.step()
        number += 1
        if elapsed >= shown:
            shown = elapsed + 0.1
            with torch.no_grad():
                loss, shares = losses(head, kept_out, NUM_DRAFTS)
            figures = ", ".join(f"{share:.3f}" for share in shares)
            print(f"# {elapsed:.0%}: step {number}, loss {loss:.3f}, accepted {figures}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="gets the head")
    parser.add_argument("--set", nargs="*", default=[], metavar="FIELD=VALUE", help="fields of EngineConfig")
    parser.add_argument("--seed", type=int, default=0, help="of the prompts; texts of all seeds are read")
    parser.add_argument("--tokens", type=int, default=24_000, help="of the answers; 0 for the texts that are there")
    parser.add_argument("--vocab", type=int, default=4096, help="token ids that the head drafts")
    parser.add_argument("--minutes", type=float, default=15.0, help="of training; 0: only write texts")
    parser.add_argument("--batch", type=int, default=6, help="texts of a training step")
    args = parser.parse_args()
    defaults = {"kv_cache_memory": 0.25, "max_num_seqs": 32, "max_model_len": 256, "prefix_cache": False}
    config = engine_config(args.set, **defaults)
    llm = LLM(**{field.name: getattr(config, field.name) for field in fields(config)})
    target, layers = llm.runner.decoder, llm.runner.decoder.spec.num_layers
    taps = (2, layers // 2, layers)
    args.folder.mkdir(parents=True, exist_ok=True)
    if args.tokens:
        record(llm, taps, args.folder / f"texts-{args.seed}.pt", args.tokens, args.seed)
    if args.minutes:
        texts: list[Recorded] = [text for path in sorted(args.folder.glob("texts-*.pt")) for text in torch.load(path)]
        head = Trainee(target, len(taps), choose_ids(target, texts, args.vocab))
        train(head, texts, 60 * args.minutes, args.batch)
        head.save(args.folder, taps)


if __name__ == "__main__":
    main()
