"""Kernels of layers with states against their torch twins, over histories of requests."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.kernels.states.causal_conv import causal_conv_triton, short_conv_triton
from runtime.kernels.states.causal_conv_torch import causal_conv_torch, short_conv_torch
from runtime.kernels.states.delta_rule import delta_rule_triton
from runtime.kernels.states.state_rows import ConvState
from runtime.spec.kv_cache_spec import CHUNK, RING
from tests.support.examples import examples
from tests.support.kernels import state_cases
from tests.support.kernels.state_cases import NEAR, SMALL, Heads, Layers, Span

kernels = state_cases.layer_of(causal_conv_triton, delta_rule_triton)
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float16])


@dtypes
@pytest.mark.parametrize("heads", [SMALL, Heads(2, 6, 16, 32), Heads(1, 1, 24, 48, 3)])
def test_steps_of_requests(heads, dtype):
    layers = Layers(kernels, heads, dtype)
    layers.step([Span(0, 0, 1, 0), Span(1, 0, 2, 0), Span(2, 0, 9, 0), Span(None, 0, 1, 0)], steps_only=True)
    layers.step([Span(0, 1, 1, 0), Span(1, 1, 1, 0), Span(2, 3, 9, 0)])  # a row is planned again; 3 of 9 are accepted
    layers.step([Span(2, 4, 9, 0), Span(0, 2, 4, 0), Span(None, 0, 1, 0), Span(None, 0, 1, 0)], steps_only=True)
    layers.step([Span(1, 2, 40, 0), Span(0, 5, 17, 0)])  # tokens that a request decoded before it moved here
    layers.step([Span(1, 42, 1, 0), Span(0, 22, 9, 0)], steps_only=True)


@dtypes
@pytest.mark.parametrize("heads", [SMALL, Heads(2, 6, 16, 32), Heads(1, 1, 24, 48, 3)])
def test_prompts(heads, dtype):
    layers = Layers(kernels, heads, dtype)
    layers.step([Span(0, 0, 1, 1), Span(1, 0, 64, 70), Span(2, 0, 200, 199, 128, 6), Span(None, 0, 70, 0)])
    layers.step([Span(1, 64, 8, 70), Span(0, 1, 3, 1), Span(3, 0, 192, 400, 192, 7), Span(2, 200, 1, 199)])
    layers.step([Span(3, 192, 128, 400), Span(None, 0, 1, 0), Span(1, 71, 2, 70)])
    layers.step([Span(3, 320, 100, 400, 384, 8), Span(1, 72, 9, 70)])
