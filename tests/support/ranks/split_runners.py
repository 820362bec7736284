"""Runners in lockstep, as ranks with the logits of parts of the vocabulary. Each has the whole model, so one rank must
have the same logits to the bit, and the same answers."""

from collections.abc import Callable
from functools import partial

import msgspec
import numpy as np
import torch

from runtime.base.reports import GrammarSamples, Report
from runtime.base.shard import Shard
from runtime.core.plan import StepPlan, StepResult
from runtime.features.grammar_state import GrammarState
from runtime.worker.ranks.split_logits import SplitLogits
from runtime.worker.runner import ModelRunner
from tests.support.ranks.lockstep_ranks import LockstepGroup, LockstepRank


def split(runner: ModelRunner, rank: LockstepRank) -> ModelRunner:
    """The runner as one rank of its group."""
    steps, vocab_size = runner.steps, runner.decoder.spec.vocab_size
    steps.sampler.split = parts = SplitLogits(vocab_size, rank)
    for extra in steps.extras:
        if hasattr(extra, "split"):
            extra.split = parts
    if rank.rank:
        shard = Shard(rank.rank, rank.size)
        runner.masks = steps.masks = GrammarState(vocab_size, shard=shard)
    compute = runner.decoder.logits

    def own_logits(hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        logits = compute(hidden)[:, parts.own_ids.start : parts.own_ids.stop].contiguous()
        return logits if out is None else out.copy_(logits)

    runner.decoder.logits = own_logits
    runner.reset()
    return runner


class SplitRunner:
    """A `Runner` of all ranks. At each step all must have sampled the tokens of one rank, and rank 0's result must
    equal that rank's."""

    def __init__(
        self, size: int, make: Callable[[], ModelRunner], prepare: Callable[[ModelRunner], None] = lambda runner: None
    ) -> None:
        self.alone, self.group = make(), LockstepGroup(size)
        self.runners = [split(make(), rank) for rank in self.group.ranks]
        for runner in (self.alone, *self.runners):
            prepare(runner)
        self.config, self.info, self.asynchronous = self.alone.config, self.alone.info, False

    def reset(self) -> None:
        for runner in (self.alone, *self.runners):
            runner.reset()

    def launch(self, plan: StepPlan) -> Callable[[], StepResult]:
        return partial(self.execute, plan)

    def execute(self, plan: StepPlan) -> StepResult:
        want, results = self.alone.execute(plan), self.group.run(lambda rank: self.runners[rank.rank].execute(plan))
        for result in results:
            assert result.token_ids.tolist() == want.token_ids.tolist()
        for name in ("logprob_rows", "ranks", "logprobs", "top_ids", "top_logprobs"):
            assert np.array_equal(getattr(results[0], name), getattr(want, name)), name
        assert _comparable(results[0]) == _comparable(want)
        return results[0]


def _comparable(result: StepResult) -> list[tuple[int, Report]]:
    """The reports of a result. Which engine begins a grammar depends on time."""
    return [
        (
            number,
            msgspec.structs.replace(report, begun=(sum(report.begun), 0))
            if isinstance(report, GrammarSamples)
            else report,
        )
        for number, report in result.reports
    ]
