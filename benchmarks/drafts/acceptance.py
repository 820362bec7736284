"""How often a model accepts a draft's tokens, and whether its own stay the same: held-out prompts, deterministic mode.

    python -m benchmarks.drafts.acceptance DRAFT [--model NAME] [--answer-len 64] [--out FILE]

DRAFT is as EngineConfig.draft: a head's folder, mtp, ngram or a model. Each kind of prompt makes one burst, and each
sampling has a line:

    rounds        rounds of the engine, which verify up to three draft tokens
    accepted      share of these rounds in which draft token 1 was accepted, 1 and 2, 1 to 3
    equal         answers that have the tokens which the model makes without a draft
    equal_rounds  with --repeats: the rounds stay the same with prefix hits, and with one request at a time

With a head on a CPU, the same shares after every token of the answers (`positions`), for four ways to draft:

    coupled       the target's noise, as in Callboard: accepted if the target samples the same token
    rejection     rejection sampling: the expected value is the sum of min(p, q)
    greedy        the head's best token, accepted if the target samples it: p of this token
    uncoupled     noise of the draft's own: the sum of p q

p and q follow temperature, top-k and top-p. Draft tokens 2 and 3 are computed after the target's own tokens, and count
by the chance that the earlier ones are accepted.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import fields
from functools import reduce
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks.library.measure import Results, engine_config, new_parser
from runtime.base.arrays import Int32s
from runtime.base.config import DEFAULT_MODEL, EngineConfig
from runtime.base.types import SamplingParams
from runtime.kernels.sampling import sample
from runtime.llm import LLM
from runtime.speculation.choose_k import Speculation
from runtime.worker.cpu.sampler import Sampler
from runtime.worker.cpu.slots import Slots
from runtime.worker.heads.cpu_head import CpuHead

NUM_DRAFTS = 3
SAMPLINGS = (
    {"temperature": 1.0},
    {"temperature": 1.0, "top_k": 20, "top_p": 0.95},
    {"temperature": 0.6},
    {"temperature": 0.0},
)
WAYS = "coupled", "rejection", "greedy", "uncoupled"
Targets = dict[tuple[int, int], torch.Tensor]  # (seed, position) -> [vocab] p

_TOPICS = (
    "apples", "a lighthouse", "trains", "the moon", "honey bees", "a violin", "winter", "old maps", "a small bakery",
    "whales", "bicycles", "the desert", "clocks", "a chess club", "volcanoes", "tea", "libraries", "a football match",
    "spiders", "windmills", "a school trip", "diamonds", "rice", "submarines", "kites", "a birthday party", "glaciers",
    "horses", "coffee", "the stock market", "robots", "paintings", "a hospital", "bridges", "dreams", "wolves",
    "potatoes", "a theatre", "rivers", "camels", "the post office", "rockets", "owls", "gardening", "a jazz band",
    "elevators", "islands", "mirrors",
)  # fmt: skip
_NUM_HELD_OUT = 8  # topics at the end, which no head is trained on
_FORMS = {
    "prose": (
        "Write a short story about {}.", "Explain {} to a child.", "Describe {} in one paragraph.",
        "Write a letter to a friend about {}.",
    ),
    "code": (
        "Write a Python class for {}.", "Write a Python function that counts {} in a list of strings.",
        "Write a web page in HTML about {}.", "Write an SQL table for {} and a query that reads it.",
    ),
    "lists": (
        "List ten facts about {}.", "Give numbered steps to learn more about {}.", "List eight questions about {}.",
        "Make a table with three columns about {}.",
    ),
}  # fmt: skip


def chat(text: str) -> list[dict[str, str]]:
    """The conversation that a prompt begins."""
    return [{"role": "system", "content": ""}, {"role": "user", "content": text}]


def prompts(held_out: bool) -> list[tuple[str, str]]:
    """(kind, text) of prompts, the kinds in turn. The held-out ones are about other topics."""
    topics = _TOPICS[-_NUM_HELD_OUT:] if held_out else _TOPICS[:-_NUM_HELD_OUT]
    pairs = [(topic, i) for i in range(4) for topic in topics]
    return [(kind, forms[i].format(topic)) for topic, i in pairs for kind, forms in _FORMS.items()]


class Recorder:
    """Reads the distributions of a CPU runner's sampler.

    With `given`, each text's known tokens by its seed, it puts these in the place of draft tokens and compares."""

    def __init__(self, llm: LLM, given: Mapping[int, list[int]] | None = None, targets: Targets | None = None) -> None:
        self.sampler: Sampler = llm.runner.steps.sampler
        self.given, self.targets = given, {} if targets is None else targets
        # (seed, first drafted position) -> for each draft token: shares by WAYS, and the weights after it
        self.found: dict[tuple[int, int], list[tuple[list[float], list[float]]]] = defaultdict(list)
        self._sample, self._draft, self._calls = self.sampler.sample, self.sampler.draft, 0

    def __enter__(self) -> Recorder:
        vars(self.sampler).update({"sample": self.sample} if self.given is None else {"draft": self.draft})
        return self

    def __exit__(self, *exception: object) -> None:
        vars(self.sampler).pop("sample" if self.given is None else "draft")

    def _probabilities(self, logits: torch.Tensor, slots: Int32s) -> torch.Tensor:
        """[n, vocab] that a sample is drawn from."""
        rows = torch.from_numpy(self.sampler.rows[slots])
        temperatures = rows.view(torch.float32)[:, sample.TEMPERATURE, None]
        if not temperatures.all():  # a burst's rows are alike
            return torch.zeros_like(logits).scatter_(1, logits.argmax(1, keepdim=True), 1.0)
        scaled = logits / temperatures
        bounds = self.sampler.filter_bounds(scaled, sample.filters_of(rows))
        return scaled.masked_fill(scaled < bounds[:, None], -torch.inf).softmax(-1)

    def sample(self, logits: torch.Tensor, slots: Int32s, positions: Int32s, *others: Any) -> Any:
        """The sampler's samples. Keeps the target's distributions."""
        seeds = self.sampler.rows[slots, sample.SEED_LOW].tolist()
        keys = zip(seeds, positions.tolist(), strict=True)
        self.targets.update(zip(keys, self._probabilities(logits.float(), slots), strict=True))
        return self._sample(logits, slots, positions, *others)

    def draft(self, logits: torch.Tensor, slots: Int32s, positions: Int32s, state: Slots) -> torch.Tensor:
        """The known tokens in place of drafted ones, after a comparison by WAYS."""
        own, number = self._draft(logits, slots, positions, state), self._calls % NUM_DRAFTS
        self._calls += 1
        assert self.given is not None
        seeds, result = self.sampler.rows[slots, sample.SEED_LOW].tolist(), own.clone()
        for i, q in enumerate(self._probabilities(logits.float(), slots)):
            place = seeds[i], int(positions[i])
            p = self.targets.get(place)  # an engine may sample behind an answer's end
            if p is None or place[1] >= len(self.given[seeds[i]]):
                continue
            result[i] = token = self.given[seeds[i]][place[1]]
            best, agrees = int(q.argmax()), float(own[i] == token)
            shares = [agrees, float(torch.minimum(p, q).sum()), float(p[best]), float(p @ q)]
            weights = [agrees, min(1.0, float(q[token] / p[token])), float(best == token), float(q[token])]
            self.found[place[0], place[1] - number].append((shares, weights))
        return result

    def sums(self) -> tuple[int, np.ndarray]:
        """Number of compared rounds, and sums [WAYS, draft tokens]: the chances to accept up to each token."""
        whole = [each for each in self.found.values() if len(each) == NUM_DRAFTS]
        values = np.array(whole).reshape(-1, NUM_DRAFTS, 2, len(WAYS))
        weights = np.concatenate((np.ones_like(values[:, :1, 1]), values[:, :-1, 1]), 1)
        return len(whole), (weights.cumprod(1) * values[:, :, 0]).sum(0).T


class Bench:
    """A model with and without a draft."""

    def __init__(self, config: EngineConfig, draft: str) -> None:
        settings = {field.name: getattr(config, field.name) for field in fields(config)}
        self.plain = LLM(**settings)
        self.drafting = LLM(**settings | {"draft": draft, "num_draft_tokens": NUM_DRAFTS})
        self.has_head = isinstance(self.drafting.runner.steps.head, CpuHead)

    def answers(self, prompts: list[list[int]], params: list[SamplingParams]) -> tuple[list[list[int]], np.ndarray]:
        """Tokens with the draft. Also the rounds, and those in which the draft tokens 1, 1 to 2, ... were accepted."""
        stats = self.drafting.engine.scheduler.stats
        before = np.array([stats.drafts, *stats.accepted_by_position])
        answers = self.drafting.generate(prompts, params, progress=False)
        counts = np.array([stats.drafts, *stats.accepted_by_position]) - before
        return [answer.token_ids for answer in answers], counts[: NUM_DRAFTS + 1]

    def measure(self, prompts: list[list[int]], params: list[SamplingParams]) -> Figures:
        """One burst with the draft, without it, and with a comparison at each position."""
        tokens, rounds = self.answers(prompts, params)
        with Recorder(self.plain) if self.has_head else nullcontext() as plain:
            wanted = [answer.token_ids for answer in self.plain.generate(prompts, params, progress=False)]
        equal = np.array([sum(map(list.__eq__, tokens, wanted)), len(wanted)])
        if plain is None:
            return Figures(rounds, equal, 0, np.zeros((len(WAYS), NUM_DRAFTS)))
        return Figures(rounds, equal, *self.compare(prompts, params, wanted, plain.targets).sums())

    def compare(
        self, prompts: list[list[int]], params: list[SamplingParams], answers: list[list[int]], targets: Targets
    ) -> Recorder:
        """The draft tokens after every token of the answers."""
        given = {p.seed or 0: prompt + answer for p, prompt, answer in zip(params, prompts, answers, strict=True)}
        drafter = self.drafting.engine.extras[Speculation].drafter
        vars(drafter)["guess"] = lambda state, most: None  # one token a step, and draft tokens after it
        with Recorder(self.drafting, given, targets) as recorder:
            self.drafting.generate(prompts, params, progress=False)
        del vars(drafter)["guess"]
        return recorder

    def repeats(self, prompts: list[list[int]], params: list[SamplingParams], rounds: np.ndarray) -> dict[str, Any]:
        """Whether a burst that finds its prompts in the prefix cache, and one prompt at a time, have these rounds."""
        stats = self.drafting.engine.scheduler.stats
        cached = stats.prompt_tokens_cached
        _, hits = self.answers(prompts, params)
        cached = stats.prompt_tokens_cached - cached
        alone = [self.answers([prompt], [one])[1] for prompt, one in zip(prompts, params, strict=True)]
        are_equal = {"hits": np.array_equal(hits, rounds), "alone": np.array_equal(np.sum(alone, 0), rounds)}
        return {"prompt_tokens_cached": cached, "equal_rounds": are_equal}


class Figures(NamedTuple):
    """Counts of a burst."""

    rounds: np.ndarray  # rounds, and those in which the draft tokens 1, 1 to 2, 1 to 3 were accepted
    equal: np.ndarray  # answers with the tokens of a model without a draft, and all answers
    positions: int
    sums: np.ndarray  # [WAYS, draft tokens] chances at these positions

    def plus(self, other: Figures) -> Figures:
        return Figures(*(a + b for a, b in zip(self, other, strict=True)))

    def values(self) -> dict[str, Any]:
        """The figures of a line."""
        count, *accepted = self.rounds.tolist()
        found = {
            "rounds": count, "accepted": [n / count for n in accepted] if count else [],
            "tokens_a_round": 1 + sum(accepted) / max(1, count), "equal": "{} of {}".format(*self.equal),
        }  # fmt: skip
        if self.positions:
            found |= {"positions": self.positions}
            found |= {way: (sums / self.positions).tolist() for way, sums in zip(WAYS, self.sums, strict=True)}
        return found


def main() -> None:
    parser = new_parser(__doc__, model=False)
    parser.add_argument("draft", help="as EngineConfig.draft")
    parser.add_argument("--model", default=DEFAULT_MODEL, help="as EngineConfig.model")
    parser.add_argument("--answer-len", type=int, default=64)
    parser.add_argument("--prompts", type=int, default=8, help="of each kind")
    parser.add_argument("--repeats", action="store_true", help="also with prefix hits, and one prompt at a time")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[1.0, 0.6, 0.0])
    args = parser.parse_args()
    defaults = {"kv_cache_memory": 0.5, "max_num_seqs": args.prompts, "max_model_len": 512, "deterministic": True}
    config = engine_config(args.set, model=args.model, **defaults)
    bench, results = Bench(config, args.draft), Results("acceptance", args.out)
    asked: dict[str, list[list[int]]] = defaultdict(list)
    for kind, text in prompts(held_out=True)[: args.prompts * len(_FORMS)]:
        asked[kind].append(bench.plain.chat_prompt(chat(text)))
    for sampling in [each for each in SAMPLINGS if each["temperature"] in args.temperatures]:
        params = [SamplingParams(max_tokens=args.answer_len, seed=seed, **sampling) for seed in range(args.prompts)]
        common: dict[str, Any] = {"draft": args.draft, **sampling}
        figures = []
        for kind, each in asked.items():
            found = bench.measure(each, params)
            repeats = bench.repeats(each, params, found.rounds) if args.repeats else {}
            results.add(config, **common, kind=kind, **found.values(), **repeats)
            figures.append(found)
        results.add(config, **common, kind="all", **reduce(Figures.plus, figures).values())


if __name__ == "__main__":
    main()
