"""The accuracy that settings and weight formats cost: a real text scored by one model in several ways.

    python -m benchmarks.quality --round fp8 int8 int4:32 nf4:64
    python -m benchmarks.quality --model FOLDER --variants quantization=fp8 quantization=fp8,kv_cache_dtype=fp8
    python -m benchmarks.quality --variants kv_cache_dtype=fp8 --tokens 0 --needles 8192

The reference is the model as `--reference` sets it. Everything is compared with it: perplexity of the text, divergence
(KL) of the next token's distribution in nats, and the share of equal likeliest tokens. The text is that of
`pydoc_data.topics`, Python's own reference, or a file; it is scored in windows of `--window` tokens.

A variant is a list of EngineConfig's fields. `--round` measures weight formats without kernels. Each weight of a linear
map except the head becomes the nearest value of the format, and is multiplied as a dense one. A format is a name of
runtime.quant.encodings, perhaps with the columns that share a scale, perhaps with `min` for zero points: int4:32:min.

`--needles N` hides a number in texts of N tokens, one at every eighth, and requests it at the end.
"""

from __future__ import annotations

import gc
import math
import pydoc_data.topics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tqdm import tqdm

from benchmarks.library.measure import Results, engine_config, new_parser
from runtime.assembly.engine import build_engine
from runtime.assembly.runner import build_runner
from runtime.base.config import DEFAULT_MODEL, EngineConfig
from runtime.base.model.decoder_spec import DecoderSpec
from runtime.base.types import Request, SamplingParams
from runtime.core.executor import InProcess
from runtime.kernels.collectives.communicator import Communicator
from runtime.kernels.numerics import Numerics
from runtime.loading.resolve import resolve
from runtime.models.decoder import Decoder
from runtime.models.decoder_build import build_decoder
from runtime.models.weights import read_from
from runtime.quant.encodings import ENCODINGS, Encoding
from runtime.quant.held_weight import HeldWeight, held_dense
from runtime.text.tokenizer import Tokenizer
from runtime.worker.sources import CheckpointSource

_KEPT = 256  # of the reference's distributions, the likeliest tokens, with the others together: KL is a bit too small
_SMALLEST = 1e-7  # probability of the others: less is rounding of float32
_NEEDLE = "\n\nRemember this: the number of the {} is {}.\n\n"
_QUESTION = "\n\nRemember this: the number of the {} is"
_PLACES = (
    *("northern gate", "old lighthouse", "blue house", "third bridge"),
    *("railway station", "town hall", "east tower", "stone mill"),
)


class RoundedSource(CheckpointSource):
    """A checkpoint that rounds the weights of linear maps to the nearest values of a format. They stay dense."""

    def __init__(self, path: Path, form: Encoding) -> None:
        super().__init__(path)
        self.form = form

    def load(self, spec: DecoderSpec, numerics: Numerics, max_model_len: int, communicator: Communicator) -> Decoder:
        read = read_from(self.checkpoint, spec, self.weight_map, numerics)

        def rounded(parameter: str) -> HeldWeight:
            weight = read(parameter)
            if not parameter.endswith(".weight") or ".router." in parameter:
                return weight
            return held_dense(parameter, self.form.dequantize(self.form.encode(weight.dense.float()), numerics.dtype))

        return build_decoder(spec, numerics, max_model_len, rounded)


class Model:
    """An engine in this process that shows its logits as they are computed."""

    def __init__(self, config: EngineConfig, source: CheckpointSource) -> None:
        self.runner = build_runner(config, source)
        self.core = build_engine(config, self.runner.info, InProcess(self.runner))
        self.take: Callable[[torch.Tensor], None] = lambda logits: None
        compute, self._num_requests = self.runner.decoder.logits, 0

        def logits(hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
            result = compute(hidden, out)
            self.take(result)
            return result

        self.runner.decoder.logits = logits

    def score(self, token_ids: list[int], take: Callable[[torch.Tensor], None]) -> None:
        """`take` gets the logits of the token after each but the last, in order, some at a time."""
        self.take = take
        self._run(token_ids, SamplingParams(max_tokens=0, prompt_logprobs=0, temperature=0.0))

    def answer(self, token_ids: list[int], num_tokens: int) -> list[int]:
        """The greedy continuation."""
        self.take = lambda logits: None
        return self._run(token_ids, SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True))

    def _run(self, token_ids: list[int], params: SamplingParams) -> list[int]:
        self._num_requests += 1
        self.core.add(Request(str(self._num_requests), list(token_ids), len(token_ids), params))
        tokens: list[int] = []
        while self.core.has_work:
            if (output := self.core.step()) is not None:
                tokens += [int(token) for token in output.token_ids]
        return tokens


class Known(NamedTuple):
    """The reference's distribution of the tokens that follow, for some rows."""

    ids: torch.Tensor  # [rows, _KEPT] the likeliest, best first
    logprobs: torch.Tensor  # theirs


@dataclass
class Sums:
    """Sums over all scored tokens."""

    loss: float = 0.0
    divergence: float = 0.0
    agreed: int = 0
    count: int = 0

    def figures(self) -> dict[str, float]:
        n = self.count
        return {"perplexity": math.exp(self.loss / n), "kl": self.divergence / n, "top1": self.agreed / n}


def score(
    model: Model, windows: Sequence[list[int]], known: list[Known] | None, label: str
) -> tuple[Sums, list[Known]]:
    """The sums of a model, compared with the reference's result of each window; and this model's own results, if it is
    the reference."""
    sums, said = Sums(), []
    for i, window in enumerate(tqdm(windows, unit="window", desc=label, leave=False)):
        parts: list[Known] = []

        def take(logits: torch.Tensor, i: int = i, targets: list[int] = window[1:], parts: list[Known] = parts) -> None:
            logprobs, start = logits.float().log_softmax(-1), sum(len(part.ids) for part in parts)
            rows = slice(start, start + len(logprobs))
            own = logprobs.gather(1, torch.tensor(targets[rows], device=logits.device)[:, None])
            sums.loss -= float(own.sum(dtype=torch.float64))
            sums.count += len(own)
            best = logprobs.topk(min(_KEPT, logprobs.shape[1]))
            parts.append(Known(best.indices.int().cpu(), best.values.cpu()))
            if known is not None:
                ids, reference = (tensor[rows].to(logits.device) for tensor in known[i])
                sums.agreed += int((best.indices[:, 0] == ids[:, 0]).sum())
                sums.divergence += divergence(reference, logprobs.gather(1, ids.long()))

        model.score(window, take)
        if known is None:
            said.append(Known(*map(torch.cat, zip(*parts, strict=True))))
    return sums, said


def divergence(p: torch.Tensor, q: torch.Tensor) -> float:
    """The summed KL of rows of log-probabilities of the same tokens; in each row all other tokens count as one."""
    p_others, q_others = ((1 - logprobs.exp().sum(-1)).clamp_min(_SMALLEST) for logprobs in (p, q))
    return float((p.exp() * (p - q)).sum(dtype=torch.float64) + (p_others * (p_others / q_others).log()).sum())


def needles(tokenizer: Tokenizer, text: list[int], length: int) -> list[tuple[list[int], list[int]]]:
    """Prompts of `length` tokens with a number at the middle of each eighth, and the tokens of the number."""
    cases = []
    for i, place in enumerate(_PLACES):
        number = 1234 + 1111 * i
        needle = tokenizer.encode(_NEEDLE.format(place, number), add_special_tokens=False)
        question = tokenizer.encode(_QUESTION.format(place), add_special_tokens=False)
        whole = tokenizer.encode(_QUESTION.format(place) + f" {number}", add_special_tokens=False)
        start = tokenizer.encode("")[:1]
        filler = text[: length - len(start) - len(needle) - len(whole)]
        at = len(filler) * (2 * i + 1) // 16
        cases.append(([*start, *filler[:at], *needle, *filler[at:], *question], whole[len(question) :]))
    return cases


def form_of(text: str) -> Encoding:
    """The form that `--round` names."""
    name, *more = text.split(":")
    columns = next((int(part) for part in more if part.isdigit()), 0)
    return replace(ENCODINGS[name], group_size=columns, has_zero_points="min" in more)


def main() -> None:
    parser = new_parser(__doc__ or "", model=False)
    parser.add_argument("--model", default=DEFAULT_MODEL, help="as callboard serve takes it")
    parser.add_argument("--reference", nargs="*", default=[], metavar="FIELD=VALUE", help="the reference's own fields")
    parser.add_argument("--variants", nargs="*", default=[], metavar="FIELD=VALUE,...")
    parser.add_argument("--round", nargs="*", default=[], metavar="FORM[:COLUMNS][:min]")
    parser.add_argument("--text", type=Path, help="a file; default: pydoc_data.topics")
    parser.add_argument("--tokens", type=int, default=20480, help="of the text, to score; 0: none")
    parser.add_argument("--window", type=int, default=1024, metavar="TOKENS")
    parser.add_argument("--needles", type=int, default=0, metavar="TOKENS", help="length of texts that hide a number")
    args = parser.parse_args()
    path, results = resolve(args.model, None), Results("quality", args.out)
    tokenizer = Tokenizer.load(path)
    text = args.text.read_text() if args.text else "\n\n".join(pydoc_data.topics.topics.values())
    token_ids, begin = tokenizer.encode(text, add_special_tokens=False), tokenizer.encode("")[:1]
    step = args.window - len(begin)
    starts = range(0, min(args.tokens, len(token_ids)) - step + 1, step)
    windows = [[*begin, *token_ids[start : start + step]] for start in starts]
    hidden = needles(tokenizer, token_ids, args.needles) if args.needles else []
    limit = {"max_num_seqs": 1, "max_model_len": max(args.window, args.needles) + 64, "prefix_cache": False}
    known: list[Known] | None = None
    perplexity = math.nan  # the reference's
    for label, settings, form in [
        ("reference", args.reference, None),
        *((variant, variant.split(","), None) for variant in args.variants),
        *((f"rounded to {name}", args.reference, form_of(name)) for name in args.round),
    ]:
        config = engine_config([*args.set, *settings], model=args.model, **limit)
        model = Model(config, RoundedSource(path, form) if form else CheckpointSource(path))
        figures: dict[str, Any] = {}
        if windows:
            sums, said = score(model, windows, known, label)
            figures = sums.figures()
            if known is None:
                known, perplexity = said, figures["perplexity"]
            else:
                figures["perplexity_change"] = figures["perplexity"] / perplexity - 1
        if hidden:
            cases = tqdm(hidden, unit="needle", desc=label, leave=False)
            figures["needles"] = "".join("-+"[model.answer(prompt, len(want)) == want] for prompt, want in cases)
        results.add(config, variant=label, scored=sum(map(len, windows)) - len(windows), **figures)
        del model
        gc.collect()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
