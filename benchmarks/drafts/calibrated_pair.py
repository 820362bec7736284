"""Makes a target and a draft with random weights that agree at a chosen rate, to time speculation with.

    python -m benchmarks.drafts.calibrated_pair /tmp/pair --draft small --acceptance 0.8

OUT/target has the shape of Llama-3.1-8B, OUT/draft one of DRAFTS. The target contains the draft. The first dimensions
of its residual stream are the draft's. Its first layers' matrices have the draft's layers in their corners, and its
head's first columns are the draft's head. The rest is noise, and epsilon scales all outputs into the residual stream.
At 0 the two are one model (the norms of the wider stream compensate for the width). The larger epsilon is, the less
they agree. Epsilon is found by bisection on both models' samples (`find_matches`), half greedy, half at
temperature 1. The printed figures come from other prompts. Such a pair differs from a trained one: all stretches in its
text are about equally hard to guess.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.library.make_random_model import write_folder
from benchmarks.library.measure import Results, new_parser
from benchmarks.library.models import CONFIGS
from runtime.base.arrays import Int32s
from runtime.base.config import EngineConfig
from runtime.base.model.decoder_spec import DecoderSpec
from runtime.base.types import SamplingParams
from runtime.core.plan import NewSlot, StepPlan
from runtime.kernels.numerics import Numerics
from runtime.models import load_spec
from runtime.models.decoder import Decoder
from runtime.models.decoder_build import build_decoder
from runtime.quant.held_weight import held_dense
from runtime.worker.cpu.cpu_steps import CpuSteps
from runtime.worker.gpu.gpu_steps import GpuSteps
from runtime.worker.kv_cache import KVCache
from runtime.worker.runner import choose_numerics

TARGET = CONFIGS["llama-3.1-8b"]
DRAFTS: dict[str, dict[str, Any]] = {  # four query heads a kv head, and the target's head size
    "small": {
        "num_hidden_layers": 2, "hidden_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 2,
        "intermediate_size": 4096,
    },
    "1b": {
        "num_hidden_layers": 16, "hidden_size": 2048, "num_attention_heads": 16, "num_key_value_heads": 4,
        "intermediate_size": 8192,
    },
}  # fmt: skip
TINY_TARGET = TARGET | {
    "num_hidden_layers": 4, "hidden_size": 128, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 16,
    "intermediate_size": 256, "vocab_size": 512, "max_position_embeddings": 16384, "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
TINY_DRAFT = {
    "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 1,
    "intermediate_size": 128,
}  # fmt: skip

TEMPERATURES = (0.0, 1.0)
PROMPT_LEN, OUTPUT_LEN = 128, 64
_BLOCK_SIZE = 16  # the served size

_EMBED_STD = 0.4  # layers write about 0.6 each: the last token alone must not determine the next one
_QUERY_GAIN = 2.0  # attention that picks some positions, not a mean of all
_FREEZING = 0.95  # see _head_gain
_NOISY = (".out.weight", ".down.weight")  # weights that write into the residual stream


class Pair:
    """The weights of both, in memory; the target's for every epsilon."""

    def __init__(self, target: dict[str, Any], draft: dict[str, Any], numerics: Numerics, seed: int = 0) -> None:
        """`draft` holds the fields in which the draft's config.json differs from the target's."""
        ratio = target["hidden_size"] / draft["hidden_size"]
        # Norms divide by the mean square over all dimensions. The draft's are 1 / ratio of all, and the others
        # are zero.
        eps = target["rms_norm_eps"] * ratio
        dtype_name = str(numerics.dtype).removeprefix("torch.")
        self.target_config = target | {"torch_dtype": dtype_name}
        self.draft_config = self.target_config | draft | {"tie_word_embeddings": True, "rms_norm_eps": eps}
        self.target_spec, self.draft_spec = (load_spec(c)[0] for c in (self.target_config, self.draft_config))
        self.numerics = numerics
        self._generator = torch.Generator(numerics.device).manual_seed(seed)
        width = draft["hidden_size"]
        self._draft = {n: self._draw(n, shape, width) for n, shape in self.draft_spec.shapes().items()}
        self._target: dict[str, torch.Tensor] = {}
        for name, shape in self.target_spec.shapes().items():
            weight = self._target[name] = self._draw(name, shape, width)
            if name.endswith("norm"):
                weight *= ratio**-0.5
            if name == "embed":
                weight.zero_()
            self._put_draft(name, weight)

    def _draw(self, name: str, shape: tuple[int, ...], width: int) -> torch.Tensor:
        """A random parameter of either model; `width` is the draft's, and its dimensions hold everything but noise."""
        noise = torch.randn(shape, generator=self._generator, device=self.numerics.device)
        if name == "final_norm":  # both signs, or a tied head would name the token that it has just read
            noise.sign_().mul_(_head_gain(self.target_spec.vocab_size, width))
        elif name.endswith("norm"):
            noise.mul_(0.1).add_(1.0)
        elif name in ("embed", "head"):
            noise.mul_(_EMBED_STD)
        else:
            fan_in = shape[1] if name.endswith(_NOISY) else width
            noise.mul_((_QUERY_GAIN if name.endswith(".q.weight") else 1.0) * fan_in**-0.5)
        return noise.to(self.numerics.dtype)

    def _put_draft(self, name: str, weight: torch.Tensor) -> None:
        """Copy the draft's parameter, if there is one, into the corner of the target's."""
        inner = self._draft.get("embed" if name == "head" else name)
        if inner is None:
            return
        if inner.dim() == 1:
            inner = inner * (self.draft_spec.hidden_size / self.target_spec.hidden_size) ** 0.5
        weight[tuple(slice(n) for n in inner.shape)] = inner

    def draft(self, name: str) -> torch.Tensor:
        """A parameter of the draft."""
        return self._draft[name]

    def target(self, epsilon: float) -> Callable[[str], torch.Tensor]:
        """The target's parameters by name."""

        def read(name: str) -> torch.Tensor:
            if not name.endswith(_NOISY):
                return self._target[name]
            weight = self._target[name] * epsilon
            self._put_draft(name, weight)
            return weight

        return read

    def decoder(self, epsilon: float | None) -> Decoder:
        """The target, or without an epsilon the draft."""
        num_positions = PROMPT_LEN + OUTPUT_LEN
        spec, read = (self.draft_spec, self.draft) if epsilon is None else (self.target_spec, self.target(epsilon))
        return build_decoder(spec, self.numerics, num_positions, lambda name: held_dense(name, read(name)))

    def measure(self, epsilon: float, num_prompts: int, seed: int) -> dict[str, Any]:
        """How both agree on `num_prompts` texts at each of TEMPERATURES; the target writes new ones."""
        rng = np.random.default_rng(seed)
        prompts = [
            Text(rng.integers(2, self.target_spec.vocab_size, PROMPT_LEN).tolist(), PROMPT_LEN, rng_seed, temperature)
            for temperature in TEMPERATURES
            for rng_seed in rng.integers(0, 1 << 62, num_prompts).tolist()
        ]
        texts, logprobs = extend(self.decoder(epsilon), prompts, OUTPUT_LEN)
        matches = find_matches(self.decoder(None), texts)
        free(self.numerics)
        halves = {f"{t:g}": slice(i * num_prompts, (i + 1) * num_prompts) for i, t in enumerate(TEMPERATURES)}
        # Temperature 1 draws tokens from the distribution itself: the mean of -log p is its entropy.
        return {
            "acceptance": {t: float(np.mean(matches[half])) for t, half in halves.items()},
            "tokens_a_round_of_4": {t: tokens_a_round(matches[half], 4) for t, half in halves.items()},
            "entropy_bits": float(-logprobs[halves["1"]].mean() / math.log(2)),
            "distinct_tokens": {
                t: float(np.mean([len(set(text.output)) for text in texts[half]])) for t, half in halves.items()
            },
        }


@dataclass(frozen=True, slots=True)
class Text:
    """A prompt and the tokens sampled after it."""

    token_ids: list[int]
    prompt_len: int
    seed: int
    temperature: float

    @property
    def output(self) -> list[int]:
        return self.token_ids[self.prompt_len :]


def extend(decoder: Decoder, prompts: Sequence[Text], num_tokens: int) -> tuple[list[Text], np.ndarray]:
    """The texts with `num_tokens` more tokens, sampled in one batch without regard to EOS. Also the log-probabilities
    of these tokens, [num_texts, num_tokens] in nats before temperature."""
    steps = _steps(decoder, len(prompts), max(len(p.token_ids) for p in prompts) + num_tokens)
    news = [_new_slot(slot, prompt) for slot, prompt in enumerate(prompts)]
    lengths = np.array([len(p.token_ids) for p in prompts], np.int32)
    slots, ones = np.arange(len(prompts), dtype=np.int32), np.ones(len(prompts), np.int32)
    first = StepPlan(
        0,
        new=news,
        block_table_writes=_tables(steps, len(prompts)),
        slots=slots,
        num_computed=lengths * 0,
        num_tokens=lengths,
    )
    plans = [
        first,
        *(StepPlan(i, slots=slots, num_computed=lengths + i - 1, num_tokens=ones) for i in range(1, num_tokens)),
    ]
    for plan in plans:
        plan.num_samples = ones
    results = [wait() for wait in [steps.launch(plan) for plan in plans]]
    sampled = np.stack([result.token_ids for result in results], 1).tolist()
    texts = [replace(p, token_ids=[*p.token_ids, *new]) for p, new in zip(prompts, sampled, strict=True)]
    return texts, np.stack([result.logprobs for result in results], 1)


def find_matches(decoder: Decoder, texts: Sequence[Text]) -> list[np.ndarray]:
    """For each token of each output, whether the decoder samples it too after all tokens before it."""
    steps = _steps(decoder, 1, max(len(text.token_ids) for text in texts))
    waits = []
    for i, text in enumerate(texts):
        counts, samples = np.array([[len(text.token_ids) - 1], [len(text.output)]], np.int32)
        zero = np.zeros(1, np.int32)
        plan = StepPlan(
            i, new=[_new_slot(0, text)], slots=zero, num_computed=zero, num_tokens=counts, num_samples=samples
        )
        plan.block_table_writes = _tables(steps, 1)
        waits.append(steps.launch(plan))
    return [wait().token_ids == text.output for wait, text in zip(waits, texts, strict=True)]


def tokens_a_round(matches: Sequence[np.ndarray], num_guesses: int) -> float:
    """The mean yield of a round that verifies `num_guesses`: the guesses before the first wrong one, and the target's
    own token. Rounds that a text's end cuts short do not count."""
    num_rounds = num_tokens = 0
    for right in matches:
        at = 0
        while at + num_guesses < len(right):
            wrong = np.flatnonzero(~right[at : at + num_guesses])
            at += (step := 1 + (int(wrong[0]) if len(wrong) else num_guesses))
            num_tokens, num_rounds = num_tokens + step, num_rounds + 1
    return num_tokens / num_rounds if num_rounds else 0.0


def _steps(decoder: Decoder, num_slots: int, max_len: int) -> GpuSteps | CpuSteps:
    """Steps with a KV cache in which every slot has room for `max_len` tokens."""
    numerics = decoder.numerics
    num_blocks = 1 + num_slots * -(-max_len // _BLOCK_SIZE)
    cache = KVCache(decoder.spec.kv_cache(numerics.dtype_name), num_blocks, _BLOCK_SIZE, numerics.device)
    kind = GpuSteps if numerics.backend == "triton" else CpuSteps
    return kind(decoder, cache, num_slots, max_len, ())


def _tables(steps: GpuSteps | CpuSteps, num_slots: int) -> Int32s:
    """StepPlan.block_table_writes that give each slot its share of the blocks, without block 0."""
    num_blocks = -(-steps.max_model_len // _BLOCK_SIZE)
    slots, index = np.divmod(np.arange(num_slots * num_blocks, dtype=np.int32), np.int32(num_blocks))
    return np.stack((slots, index, slots * num_blocks + index + 1))


def _new_slot(slot: int, text: Text) -> NewSlot:
    params = SamplingParams(temperature=text.temperature, ignore_eos=True, logprobs=0)
    return NewSlot(slot, np.array(text.token_ids, np.int32), text.prompt_len, text.seed, params)


def _head_gain(vocab_size: int, width: int) -> float:
    """Return the factor that gives logits the standard deviation _FREEZING * sqrt(2 ln vocab).

    N Gaussian logits are a random energy model. Their softmax has ln N - std^2 / 2 nats, and concentrates on a few
    tokens at std = sqrt(2 ln N). Somewhat below, it has a few bits, and the best two differ by about a nat. The
    noise at temperature 1 is as large, so acceptance is nearly that of greedy."""
    return _FREEZING * math.sqrt(2 * math.log(vocab_size)) / (_EMBED_STD * math.sqrt(width))


def calibrate(pair: Pair, wanted: float, *, num_prompts: int = 16, tolerance: float = 0.01) -> float:
    """The epsilon at which the mean acceptance over TEMPERATURES is `wanted`, by bisection of its logarithm."""
    low, high = 1e-3, 1.0
    for _ in range(10):
        epsilon = math.sqrt(low * high)
        start = time.perf_counter()
        acceptance = float(np.mean(list(pair.measure(epsilon, num_prompts, seed=1)["acceptance"].values())))
        print(f"# epsilon {epsilon:.4f}: acceptance {acceptance:.3f} ({time.perf_counter() - start:.1f} s)", flush=True)
        if abs(acceptance - wanted) <= tolerance:
            break
        low, high = (epsilon, high) if acceptance > wanted else (low, epsilon)
    return epsilon


def num_bytes(spec: DecoderSpec, numerics: Numerics) -> int:
    return sum(math.prod(shape) for shape in spec.shapes().values()) * numerics.dtype.itemsize


def free(numerics: Numerics) -> None:
    """Decoders have reference cycles through their kernels' closures; a GPU needs their memory back at once."""
    if numerics.device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()


def main() -> None:
    parser = new_parser(__doc__, model=False)
    parser.add_argument("folder", type=Path, help="gets the folders target and draft")
    parser.add_argument("--draft", choices=list(DRAFTS), default="small")
    parser.add_argument("--acceptance", type=float, default=0.8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tiny", action="store_true", help="a pair for tests on a CPU")
    args = parser.parse_args()
    start = time.perf_counter()

    def say(text: str) -> None:
        print(f"# {time.perf_counter() - start:5.1f} s  {text}", flush=True)

    numerics = choose_numerics(EngineConfig())
    shapes = (TINY_TARGET, TINY_DRAFT) if args.tiny else (TARGET, DRAFTS[args.draft])
    pair = Pair(*shapes, numerics, args.seed)
    say("weights drawn")
    epsilon = calibrate(pair, args.acceptance)
    figures = pair.measure(epsilon, num_prompts=32, seed=2)
    say(f"epsilon {epsilon:.4f} found")
    write_folder(args.folder / "draft", pair.draft_config, pair.draft)
    write_folder(args.folder / "target", pair.target_config, pair.target(epsilon))
    say(f"written to {args.folder}")
    sizes = {"target_bytes": num_bytes(pair.target_spec, numerics), "draft_bytes": num_bytes(pair.draft_spec, numerics)}
    draft = "tiny" if args.tiny else args.draft
    Results("calibrated_pair", args.out).add(draft=draft, wanted=args.acceptance, epsilon=epsilon, **sizes, **figures)


if __name__ == "__main__":
    main()
