"""The choice of experts on a CPU, and the choices' order by expert.

`route_torch` (kernels/experts/moe_torch.py) describes the choice. Here, the first of two equal experts is preferred."""

from __future__ import annotations

from runtime.base.model.experts_spec import ExpertsSpec
from runtime.kernels.llvm.language import (
    F32s,
    I32s,
    Int,
    Pointer,
    Value,
    array,
    f32,
    i32,
    i64,
    loop,
    maximum,
    number,
    share,
    variable,
    where,
    zeros,
)
from runtime.kernels.llvm.mathematics import exp, sigmoid

_LOWEST = float("-inf")


def choose_experts(
    logits: F32s,  # [rows, num_experts, then perhaps the shared experts' gate], rows stride apart
    bias: F32s,  # [num_experts], read with spec.choice_bias
    factors: F32s,  # [num_experts], read with spec.expert_scales
    scores: F32s,  # [rows, num_experts], memory
    preferences: F32s,  # [rows, num_experts], memory
    ids: I32s,  # [rows, choices], best first
    weights: F32s,  # [rows, choices]
    num_rows: Int,
    stride: Int,
    part: Int,
    parts: Int,
    spec: ExpertsSpec,
) -> None:
    """Part i/n: a share of the rows."""
    begin, end = share(num_rows, part, parts)
    for row in loop(begin, end):
        own, at = logits + row * stride, row * spec.num_experts
        score, preferred = scores + at, preferences + at
        _score(own, score, spec)
        for expert in loop(0, spec.num_experts):
            value = score.load(expert)
            preferred.store(expert, value + bias.load(expert) if spec.choice_bias else value)
        if spec.has_groups:
            _keep_groups(preferred, spec)
        id_, weight = ids + row * spec.choices, weights + row * spec.choices
        for choice in loop(0, spec.top_k):
            expert = _best(preferred, spec.num_experts)
            preferred.store(expert, number(_LOWEST, f32))
            id_.store(choice, expert)
            weight.store(choice, score.load(expert))
        _weigh(weight, id_, factors, spec)
        for index in range(spec.shared):
            id_.store(spec.top_k + index, number(spec.num_experts + index, i32))
            gate = sigmoid(own.load(spec.num_experts)) if spec.shared_gate else number(1.0, f32)
            weight.store(spec.top_k + index, gate)


def _score(logits: Pointer, scores: Pointer, spec: ExpertsSpec) -> None:
    """Write the scores of all experts."""
    if spec.scores == "softmax":
        _softmax(logits, scores, spec.num_experts)
        return
    for expert in loop(0, spec.num_experts):
        logit = logits.load(expert)
        scores.store(expert, sigmoid(logit) if spec.scores == "sigmoid" else logit)


def _softmax(x: Pointer, out: Pointer, count: int) -> None:
    """The softmax of `count` numbers, which may lie in `out`."""
    largest, total = variable(x.load(0)), variable(zeros(f32))
    for index in loop(1, count):
        largest.set(maximum(largest, x.load(index)))
    for index in loop(0, count):
        power = exp(x.load(index) - largest.now)
        out.store(index, power)
        total += power
    for index in loop(0, count):
        out.store(index, out.load(index) / total.now)


def _weigh(weights: Pointer, ids: Pointer, factors: Pointer, spec: ExpertsSpec) -> None:
    """Turn the scores of a row's choices into their weights."""
    if spec.scores == "softmax_of_chosen":
        _softmax(weights, weights, spec.top_k)
    total = variable(zeros(f32))
    if spec.normalized:
        for choice in loop(0, spec.top_k):
            total += weights.load(choice)
    divisor = total + spec.sum_eps
    for choice in loop(0, spec.top_k):
        weight = weights.load(choice)
        if spec.normalized:
            weight = weight / divisor
        if spec.scale != 1.0:
            weight = weight * spec.scale
        if spec.expert_scales:
            weight = weight * factors.load(ids.load(choice).to(i64))
        weights.store(choice, weight)


def _keep_groups(preferences: Pointer, spec: ExpertsSpec) -> None:
    """Take all but the best groups' experts out of the choice."""
    size = spec.num_experts // spec.groups
    group_scores, is_kept = array(f32, spec.groups), array(i32, spec.groups)
    for group in loop(0, spec.groups):
        best, second = (variable(number(_LOWEST, f32)) for _ in range(2))
        for index in loop(0, size):
            value = preferences.load(group * size + index)
            is_best = value > best.now
            second.set(where(is_best, best.now, maximum(value, second.now)))
            best.set(where(is_best, value, best.now))
        group_scores.store(group, best.now if spec.group_score == "max" else best + second.now)
        is_kept.store(group, zeros(i32))
    for _ in loop(0, spec.top_groups):
        group = _best(group_scores, spec.groups)
        group_scores.store(group, number(_LOWEST, f32))
        is_kept.store(group, number(1, i32))
    for expert in loop(0, spec.num_experts):
        kept = is_kept.load(expert // size) > 0
        preferences.store(expert, where(kept, preferences.load(expert), _LOWEST))


def _best(values: Pointer, count: int) -> Value:
    """The index of the largest among `count` elements; 0 if none is above minus infinity."""
    best, at = variable(number(_LOWEST, f32)), variable(zeros(i64))
    for index in loop(0, count):
        value = values.load(index)
        is_best = value > best.now
        best.set(where(is_best, value, best.now))
        at.set(where(is_best, index, at.now))
    return at.now


def order_choices(
    ids: I32s,  # [rows, choices]
    starts: I32s,  # [num_experts + 1]: where each expert's choices begin in `order`
    order: I32s,  # [rows * choices]: choice numbers by expert, rising for each
    rows: I32s,  # [rows * choices]: their rows
    num_choices: Int,  # choices in all rows
    part: Int,
    parts: Int,
    num_experts: int,
    choices: int,  # choices per row
) -> None:
    """A counting sort, in one part."""
    places = array(i32, num_experts)
    for expert in loop(0, num_experts + 1):
        starts.store(expert, zeros(i32))
    for index in loop(0, num_choices):
        following = ids.load(index).to(i64) + 1
        starts.store(following, starts.load(following) + 1)
    for expert in loop(0, num_experts):
        begin = starts.load(expert)
        places.store(expert, begin)
        starts.store(expert + 1, starts.load(expert + 1) + begin)
    for index in loop(0, num_choices):
        expert = ids.load(index).to(i64)
        place = places.load(expert)
        places.store(expert, place + 1)
        order.store(place.to(i64), index)
        rows.store(place.to(i64), index // choices)
