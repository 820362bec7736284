"""Steps of a family's tiny model by hand-made plans."""

from __future__ import annotations

import torch

from tests.support.models.runner_driver import Driver


def logits_of(driver: Driver, long: list[int], short: list[int]) -> torch.Tensor:
    """[steps, vocab]: a prompt in chunks beside another, then both decode; all tokens except the last are given."""
    steps = driver.runner.steps
    tokens = steps.slots.tokens
    cut, kept = len(long) - 8, []
    driver.open(0, long, prompt_len=cut + 1)  # layers with states cut a prompt only at some positions
    driver.open(1, short, prompt_len=4)
    plan = [[(0, 0, cut, 0), (1, 0, 3, 1)], [(0, cut, 6, 1), (1, 3, 1, 1)]]
    plan += [[(0, cut + 6 + i, 1, 1), (1, 4 + i, 1, 1)] for i in range(2)]
    for rows in plan:
        driver.step(*rows)
        kept.append(driver.logits.float())
        for slot, start, count, sampled in rows:
            if sampled:  # in place of the sampled token
                known = (long, short)[slot][start + count : start + count + 1]
                tokens[slot, start + count : start + count + len(known)] = torch.tensor(known)
    return torch.cat(kept)
