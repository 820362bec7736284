"""Speculation by n-gram lookup on a CPU: SmolLM2-135M with and without it, one request at a time, in alternation.

    python -m benchmarks.drafts.ngram [--repeats 3] [--tokens 128]
    python -m benchmarks.drafts.ngram --edits            # look-ups alone: an agent writes files again, with changes

Tokens per second of this process's CPU time, prefill included, on one thread, so other work on the machine does not
count. Both must give the same tokens, or it fails.
"""

from __future__ import annotations

import argparse
import time
from array import array
from pathlib import Path

from runtime.base.config import DEFAULT_MODEL
from runtime.base.types import CallboardError, Request, SamplingParams
from runtime.core.request_state import RequestState
from runtime.llm import LLM
from runtime.loading.resolve import resolve
from runtime.speculation.ngram import Ngram
from runtime.text.chat import load_tokenizer

_FUNCTION = "def add_{0}(stock, count):\n    stock['{0}'] = stock.get('{0}', 0) + count\n    return stock\n\n"
_FILE = """class Shelf:
    def __init__(self, name, width):
        self.name = name
        self.width = width
        self.books = []

    def add(self, book):
        if book.width > self.free_width():
            raise ValueError(f"{book.title} does not fit on {self.name}")
        self.books.append(book)

    def free_width(self):
        return self.width - sum(book.width for book in self.books)

    def find(self, title):
        for book in self.books:
            if book.title == title:
                return book
        return None
"""
PROMPTS = {
    "code with a pattern": "".join(map(_FUNCTION.format, ("apples", "pears", "plums"))) + "def add_cherries(",
    "a numbered list": "1. The first item costs 10 dollars.\n2. The second item costs 20 dollars.\n3.",
    "prose": "The old theatre at the end of the street had been closed for years when",
    "a file, again": f"shelf.py:\n```\n{_FILE}```\n\nThe same file once more:\n```\n{_FILE[:60]}",
}
_EDITED = "core/scheduler.py", "core/step.py", "speculation/choose_k.py", "base/config.py"
_CHANGES = ("state", "request"), ("step", "plan"), ("count", "number"), ("return", "return  "), ("self.", "this.")


def edits(tokens_of_file: int = 2000) -> list[tuple[str, str]]:
    """Prompts and outputs: each file is written again with a few changes, and then again with others."""
    found = []
    for name in _EDITED:
        text = (Path("runtime") / name).read_text()[: 4 * tokens_of_file]
        prompt = text
        for turn in range(2):
            lines = text.splitlines(keepends=True)
            for i, change in enumerate(_CHANGES):
                at = (37 * i + 11 * turn) % len(lines)
                lines[at : at + 8] = [line.replace(*change) for line in lines[at : at + 8]]
            text = "".join(lines)
            found.append((prompt, text))
            prompt += text
    return found


def replay_edits() -> None:
    """Print how many draft tokens are right, and the CPU time of a look-up, at up to seven tokens a step."""
    encode = load_tokenizer(resolve(DEFAULT_MODEL, None)).encode
    pairs = [(encode(prompt), encode(output)) for prompt, output in edits()]
    accepted = drafted = num_steps = 0
    start = time.process_time()
    for number, (prompt, output) in enumerate(pairs):
        request = Request(str(number), prompt, len(prompt), SamplingParams(), seed=0)
        state = RequestState(request, array("i", prompt), 1 << 30, frozenset(), (0, 0, 0))
        drafter, at = Ngram(), 0
        while at < len(output):
            drafter.begin_step()
            guess = drafter.guess(state, 7) or []
            right = 0
            while right < len(guess) and at + right < len(output) and guess[right] == output[at + right]:
                right += 1
            state.tokens.extend(output[at : at + right + 1])
            at += right + 1
            num_steps, drafted, accepted = num_steps + 1, drafted + len(guess), accepted + right
    us = (time.process_time() - start) / num_steps * 1e6
    rate = sum(len(output) for _, output in pairs) / num_steps
    print(f"{rate:.2f} tokens a step, {accepted} of {drafted} draft tokens right, {us:.1f} us of CPU time a step")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3, help="timed answers of each prompt, after one to warm up")
    parser.add_argument("--tokens", type=int, default=128, help="of each answer")
    parser.add_argument("--edits", action="store_true", help="replay edits of files without a model")
    args = parser.parse_args()
    if args.edits:
        return replay_edits()
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
