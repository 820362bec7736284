"""A sampling parameter is described once: this file adds one, and touches no other file of runtime."""

from dataclasses import dataclass

import msgspec
import numpy as np
import pytest
import torch

from runtime.base.sampling_fields import CAPTURED_PASS, SECOND_PASS, Effect, sampling, table_of
from runtime.base.types import CallboardError, SamplingParams
from runtime.core import plan
from runtime.core.plan import NewSlot, StepPlan, decode_plan, encode_plan
from runtime.kernels.sampling.sample import NUM_PARAMS, PENALISED_FROM, PROMPT_LEN, SEED_HIGH, SEED_LOW
from runtime.worker.cpu.sampler import Sampler
from runtime.worker.gpu.device_sampler import DeviceSampler
from runtime.worker.gpu.transfers import Transfers

CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class WithTypical(SamplingParams):
    typical_p: float = sampling(1.0, Effect.FILTER, above=0.0, high=1.0, column=10)
    no_repeat: int | None = sampling(None, Effect.PENALTY, 1, 64, column=11)


class Slot(NewSlot):
    params: WithTypical


class Plan(StepPlan):
    new: list[Slot] = msgspec.field(default_factory=list)


def new_slot(**fields) -> NewSlot:
    return NewSlot(1, np.array([3, 4, 5], np.int32), 3, -7, WithTypical(**fields))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"typical_p": 0.0}, "typical_p is 0.0; it must be above 0 and at most 1."),
        ({"typical_p": 1.5}, "typical_p is 1.5; it must be above 0 and at most 1."),
        ({"typical_p": float("nan")}, "typical_p is nan; it must be above 0 and at most 1."),
        ({"no_repeat": 65}, "no_repeat is 65; it must be between 1 and 64."),
        ({"top_p": -0.1}, "top_p is -0.1; it must be between 0 and 1."),
    ],
)
def test_it_is_validated(fields, message):
    with pytest.raises(CallboardError) as error:
        WithTypical(**fields)
    assert str(error.value) == message


@pytest.mark.parametrize("fields", [{}, {"typical_p": 0.5}, {"no_repeat": 3, "ignore_eos": True, "logprobs": 2}])
def test_it_travels_with_a_plan(monkeypatch, fields):
    monkeypatch.setattr(plan, "_plans", plan.decoder_of(Plan))
    (got,) = decode_plan(encode_plan(Plan(1, new=[new_slot(**fields)]))).new
    assert got.params == WithTypical(**fields)
    assert (got.slot, got.prompt_len, got.seed, got.token_ids.tolist()) == (1, 3, -7, [3, 4, 5])


@pytest.mark.parametrize("kind", ["host", "device"])
def test_it_has_columns_and_a_sampling_pass(kind):
    transfers = Transfers(CPU)
    sampler = Sampler(4, 50, (0,), CPU) if kind == "host" else DeviceSampler(4, 50, (0,), transfers)
    slots, positions = np.array([1], np.int32), np.array([3], np.int32)
    row = sampler.add(new_slot(typical_p=0.25, temperature=0.5))
    assert row.shape == (NUM_PARAMS,)
    assert row.view(np.float32)[[0, 4, 10]].tolist() == [0.5, 1.0, 0.25]
    assert sampler.filtered[1]
    assert sampler.is_plain(slots, positions), "filters belong to the captured pass"
    row = sampler.add(new_slot(no_repeat=5))
    assert row[11] == 5
    assert not sampler.filtered[1]
    assert sampler.is_plain(slots, positions), "penalties belong to the captured pass"
    sampler.add(new_slot(no_repeat=5, logit_bias=((3, 1.0),)))
    assert not sampler.is_plain(slots, positions), "biases belong to the second pass"


def test_the_http_api_has_its_bounds():
    limits = {f.name: f.limits for f in table_of(WithTypical).fields}
    assert limits["typical_p"] == {"gt": 0.0, "le": 1.0}
    assert limits["no_repeat"] == {"ge": 1, "le": 64}


def test_every_parameter_has_one_place():
    table = table_of(SamplingParams)
    assert not CAPTURED_PASS & SECOND_PASS
    columns = [column for column, _, _ in table.columns]
    assert len(set(columns)) == len(columns)
    assert all(0 <= column < NUM_PARAMS for column in columns)
    assert not {SEED_LOW, SEED_HIGH, PROMPT_LEN, PENALISED_FROM} & set(columns)
    for f in table.fields:
        params = SamplingParams(**{f.name: f.neutral, "max_tokens": 1})
        assert not table.has_effect(params, {f.effect} - {Effect.LENGTH})
