"""Kernels of layers with states against their torch twins, over histories of requests."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.base.kv_cache_spec import CHUNK, RING
from runtime.kernels.states.causal_conv import causal_conv_triton, short_conv_triton
from runtime.kernels.states.causal_conv_torch import causal_conv_torch, short_conv_torch
from runtime.kernels.states.delta_rule import delta_rule_triton
from runtime.kernels.step.state_rows import ConvState
from tests.support.examples import examples
from tests.support.kernels import state_cases
from tests.support.kernels.state_cases import SMALL, Heads, Layers, Span

kernels = state_cases.layer_of(causal_conv_triton, delta_rule_triton)
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float16])


@pytest.mark.one_in(3)
@dtypes
@pytest.mark.parametrize("heads", [SMALL, Heads(2, 6, 16, 32, tiled=True), Heads(1, 1, 24, 48, 3)])
def test_steps_of_requests(heads, dtype):
    layers = Layers(kernels, heads, dtype)
    layers.step([Span(0, 0, 1, 0), Span(1, 0, 2, 0), Span(2, 0, 9, 0), Span(None, 0, 1, 0)], steps_only=True)
    layers.step([Span(0, 1, 1, 0), Span(1, 1, 1, 0), Span(2, 3, 9, 0)])  # a row is planned again; 3 of 9 are accepted
    layers.step([Span(2, 4, 9, 0), Span(0, 2, 4, 0), Span(None, 0, 1, 0), Span(None, 0, 1, 0)], steps_only=True)
    layers.step([Span(1, 2, 40, 0), Span(0, 5, 17, 0)])  # tokens that a request decoded before it moved here
    layers.step([Span(1, 42, 1, 0), Span(0, 22, 9, 0)], steps_only=True)


@pytest.mark.one_in(3)
@dtypes
@pytest.mark.parametrize("heads", [SMALL, Heads(2, 6, 16, 32, tiled=True), Heads(1, 1, 24, 48, 3)])
def test_prompts(heads, dtype):
    layers = Layers(kernels, heads, dtype)
    layers.step([Span(0, 0, 1, 1), Span(1, 0, 64, 70), Span(2, 0, 200, 199, 128, 6), Span(None, 0, 70, 0)])
    layers.step([Span(1, 64, 8, 70), Span(0, 1, 3, 1), Span(3, 0, 192, 400, 192, 7), Span(2, 200, 1, 199)])
    layers.step([Span(3, 192, 128, 400), Span(None, 0, 1, 0), Span(1, 71, 2, 70)])
    layers.step([Span(3, 320, 100, 400, 384, 8), Span(1, 72, 9, 70)])


@st.composite
def histories(draw: st.DrawFn) -> list[tuple[list[Span], bool]]:
    """Steps of four slots: (rows, steps_only). Requests with known tokens behind their prompt have moved here."""
    steps: list[tuple[list[Span], bool]] = []
    requests: dict[int, tuple[int, int, int]] = {}  # slot -> prompt_end, known tokens, first token of the next row
    for _ in range(draw(st.integers(2, 6))):
        spans = []
        for slot in draw(st.lists(st.integers(0, 3), min_size=1, max_size=3, unique=True)):
            if slot not in requests or draw(st.integers(0, 7)) == 0:
                prompt_end = draw(st.integers(0, 150))
                requests[slot] = prompt_end, prompt_end + 1 + draw(st.sampled_from([0, 0, 1, 25])), 0
            prompt_end, known, start = requests[slot]
            if start < known - 1 or start < 1:
                cuts = [at for at in range(CHUNK, prompt_end, CHUNK) if at > start]
                stop = draw(st.sampled_from([*cuts, known]))
                taken = [at for at in range(CHUNK, min(stop, prompt_end) + 1, CHUNK) if at > start]
                snapshot_end = draw(st.sampled_from([0, *taken]))
                spans.append(Span(slot, start, stop - start, prompt_end, snapshot_end, 5 + slot if snapshot_end else 0))
                requests[slot] = prompt_end, known, stop - (stop == known and draw(st.booleans()))
            else:
                count = draw(st.integers(1, 9))
                spans.append(Span(slot, start, count, prompt_end))
                # All draft tokens behind the accepted ones are rejected. The last token may be planned again.
                accepted = draw(st.integers(0, count))
                requests[slot] = prompt_end, 0, start + accepted
        steps_only = all(span.start >= span.prompt_end for span in spans) and max(span.count for span in spans) < 10
        spans += [Span(None, 0, draw(st.sampled_from([1, 30])), 0)] * draw(st.integers(0, 0 if steps_only else 1))
        spans += [Span(None, 0, 1, 0)] * (2 if steps_only else 0)
        steps.append((spans, steps_only))
    return steps


@settings(max_examples=examples(32))
@given(histories(), st.sampled_from([torch.float32, torch.float16]))
def test_histories(steps, dtype):
    layers = Layers(kernels, SMALL, dtype)
    for spans, steps_only in steps:
        layers.step(spans, steps_only)


@settings(max_examples=examples(40))
@given(histories(), st.sampled_from([2, 3, 4]), st.booleans())
def test_histories_of_short_convolutions(steps, width, has_bias):
    torch.manual_seed(0)
    weight, bias = torch.randn(70, width), torch.randn(70) if has_bias else None
    mine = ConvState(torch.full((9, RING * 70 + 3), torch.nan)[:, :-3].view(9, RING, 70))
    other = ConvState(mine.inputs.clone())
    for spans, steps_only in steps:
        rows = state_cases.make_rows(spans, 4, steps_only=steps_only)
        x = torch.randn(rows.num_tokens, 3 * 70 + 1)[:, :-1]
        got, want = short_conv_triton(x, weight, bias, rows, mine), short_conv_torch(x, weight, bias, rows, other)
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
        got = causal_conv_triton(x[:, :70], weight, bias, rows, ConvState(mine.inputs.clone()))
        want = causal_conv_torch(x[:, :70], weight, bias, rows, ConvState(other.inputs.clone()))
        own = torch.cat([torch.full((span.count,), span.slot is not None) for span in spans])
        torch.testing.assert_close(got[own], want[own], atol=1e-5, rtol=1e-5)
        assert torch.equal(mine.inputs[1:].nan_to_num(7.0), other.inputs[1:].nan_to_num(7.0))
