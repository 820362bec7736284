"""Whether settings that should only change speed change tokens: the same prompts, against the default.

    python -m benchmarks.engine.agreement --model llama-3.2-1b --variants graphs-off overlap-off torch-kernels

Greedy. Where a text differs, the first position is named, with the gap there between the default's two best tokens in
nats. Rounding may reverse a near tie, and from there on the texts are unrelated.
"""

from __future__ import annotations

import gc

import numpy as np
import torch
from tqdm import tqdm

from benchmarks.library.measure import Engine, Results, engine_config, new_parser
from runtime.base.types import Request, SamplingParams

VARIANTS = {
    "again": [],
    "graphs-off": ["cuda_graphs=false"],
    "overlap-off": ["pipeline_depth=1"],
    "torch-kernels": ["kernel_backend=torch"],
    "small-chunks": ["max_num_batched_tokens=256"],
    "few-rows": ["max_num_seqs=4"],
    "deterministic": ["deterministic=true"],
    "guesses": ["draft=ngram", "num_draft_tokens=4"],
    "many-guesses": ["draft=ngram", "num_draft_tokens=8"],
}

Text = tuple[list[int], list[float]]  # tokens, and at each the gap between the best two


def answers(model: str, settings: list[str], prompts: list[list[int]], output_len: int) -> list[Text]:
    """Each prompt's greedy continuation, all in one batch, by an engine with the same random weights."""
    engine = Engine(model, engine_config(settings))
    params = SamplingParams(max_tokens=output_len, temperature=0.0, ignore_eos=True, logprobs=2)
    texts: list[Text] = [([], []) for _ in prompts]
    for i, prompt in enumerate(prompts):
        engine.core.add(Request(str(i), list(prompt), len(prompt), params), owner=i)
    with tqdm(total=len(prompts) * output_len, unit="token", desc=" ".join(settings) or "default") as bar:
        while engine.core.has_work:
            if (output := engine.core.step()) is None:
                continue
            for i, (state, token) in enumerate(zip(output.states, output.token_ids, strict=True)):
                best, second = (logprob for _, logprob in output.logprobs[i].top)
                texts[state.owner][0].append(token)
                texts[state.owner][1].append(best - second)
            bar.update(len(output.token_ids))
    del engine
    gc.collect()
    torch.cuda.empty_cache()
    return texts


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--output", type=int, default=128, help="tokens of each answer")
    args = parser.parse_args()
    results, rng = Results("agreement", args.out), np.random.default_rng(0)
    prompts = [rng.integers(1000, 30000, rng.integers(32, 513)).tolist() for _ in range(args.prompts)]
    default = answers(args.model, args.set, prompts, args.output)
    for variant in args.variants:
        settings = [*args.set, *VARIANTS[variant]]
        other = answers(args.model, settings, prompts, args.output)
        places = []  # prompt, position, gap
        for i, ((tokens, gaps), (others, _)) in enumerate(zip(default, other, strict=True)):
            if tokens != others:
                at = next(k for k, (a, b) in enumerate(zip(tokens, others, strict=True)) if a != b)
                places.append([i, at, gaps[at]])
        results.add(
            engine_config(settings), model=args.model, variant=variant, prompts=len(prompts), output_len=args.output,
            equal=len(prompts) - len(places), largest_gap=max((gap for _, _, gap in places), default=0.0),
            first_differences=places,
        )  # fmt: skip


if __name__ == "__main__":
    main()
