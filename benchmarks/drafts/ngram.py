"""Speculation by n-gram lookup on a CPU: SmolLM2-135M with and without it, one request at a time, in alternation.

    python -m benchmarks.drafts.ngram [--repeats 3] [--tokens 128]

Tokens per second of this process's CPU time, prefill included, on one thread, so other work on the machine does not
count. Both must give the same tokens, or it fails.
"""

from __future__ import annotations

import argparse
import time

from runtime.base.types import CallboardError, SamplingParams
from runtime.llm import LLM

_FUNCTION = "def add_{0}(stock, count):\n    stock['{0}'] = stock.get('{0}', 0) + count\n    return stock\n\n"
PROMPTS = {
    "code with a pattern": "".join(map(_FUNCTION.format, ("apples", "pears", "plums"))) + "def add_cherries(",
    "a numbered list": "1. The first item costs 10 dollars.\n2. The second item costs 20 dollars.\n3.",
    "prose": "The old theatre at the end of the street had been closed for years when",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3, help="timed answers of each prompt, after one to warm up")
    parser.add_argument("--tokens", type=int, default=128, help="of each answer")
    args = parser.parse_args()
    config = {"dtype": "float32", "num_threads": 1, "kv_cache_memory": 0.1, "prefix_cache": False}
    llms = [LLM(draft=draft, **config) for draft in (None, "ngram")]
    stats = llms[1].engine.scheduler.stats
    print("| prompt | temperature | off, tok/s | n-gram, tok/s | ratio | accepted of guessed |\n" + "|---" * 6 + "|")
    for name, prompt in PROMPTS.items():
        for temperature in (0.0, 0.7):
            seconds, answers = [0.0, 0.0], [[], []]  # plain, drafted
            for seed in range(args.repeats + 1):
                if seed == 1:
                    seconds = [0.0, 0.0]
                    num_accepted, num_guessed = stats.accepted_draft_tokens, stats.draft_tokens
                params = SamplingParams(max_tokens=args.tokens, temperature=temperature, ignore_eos=True, seed=seed)
                for i, llm in enumerate(llms):
                    start = time.process_time()
                    answers[i].append(llm.generate(prompt, params, progress=False)[0].token_ids)
                    seconds[i] += time.process_time() - start
            if answers[0] != answers[1]:
                raise CallboardError(f"Guesses changed the tokens of {name!r} at temperature {temperature}.")
            off, on = (args.repeats * args.tokens / s for s in seconds)
            accepted, guessed = stats.accepted_draft_tokens - num_accepted, stats.draft_tokens - num_guessed
            print(f"| {name} | {temperature} | {off:.1f} | {on:.1f} | {on / off:.2f} | {accepted} of {guessed} |")


if __name__ == "__main__":
    main()
