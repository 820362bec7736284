"""Steps and prompts of layers with states in captured graphs. (Values and bits: tests/kernels/test_states.py.)"""

from __future__ import annotations

import pytest
import torch

from runtime.kernels.states.causal_conv import causal_conv_triton
from runtime.kernels.states.delta_rule import delta_rule_triton
from tests.support.kernels import state_cases
from tests.support.kernels.state_cases import QWEN, Heads, Inputs, Span

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")

kernels = state_cases.layer_of(causal_conv_triton, delta_rule_triton)
HEADS = Heads(2, 6, 128, 128)


class Bits:
    """A layer for comparisons of launches: inputs by position, and a memory for each run."""

    def __init__(self, dtype: torch.dtype, length: int, num_slots: int = 6, heads: Heads = HEADS) -> None:
        torch.manual_seed(1)
        self.dtype, self.num_slots, self.heads = dtype, num_slots, heads
        self.weights = state_cases.make_weights(heads, dtype, "cuda")
        self.inputs = state_cases.make_inputs(heads, length, dtype, "cuda")

    def memory(self):
        return state_cases.make_state(self.heads, 2 * self.num_slots + 1, self.num_slots, self.dtype, "cuda")

    def step(self, memory, spans: list[Span], steps_only: bool = False) -> list[torch.Tensor]:
        """The outputs of each row. A token's inputs follow from its position."""
        rows = state_cases.make_rows(spans, self.num_slots, "cuda", steps_only)
        index = torch.cat([torch.arange(span.start, span.start + span.count) for span in spans]).cuda()
        inputs = Inputs(*(x[index] for x in self.inputs))
        return list(kernels(inputs, self.weights, rows, memory).split([span.count for span in spans]))


@pytest.mark.parametrize("count", [1, 4])
def test_a_captured_step_follows_the_rows(count):
    """Layers in a chain, as PDL launches them; between replays only the rows on the device change."""
    case, num_layers, num_rows = Bits(torch.bfloat16, 200, heads=QWEN), 6, 5
    memories = [case.memory() for _ in range(num_layers)]
    for memory in memories:
        case.step(memory, [Span(slot, 0, 70, 69) for slot in range(num_rows)])
    others = [state_cases.clone(memory) for memory in memories]
    spans = [Span(slot, 70, count, 69) for slot in range(num_rows)] + [Span(None, 0, count, 0)]
    rows = state_cases.make_rows(spans, case.num_slots, "cuda", steps_only=True)
    inputs = Inputs(*(torch.zeros_like(x[: rows.num_tokens]) for x in case.inputs))

    def chain(layers) -> list[torch.Tensor]:
        outs, now = [], inputs
        for memory in layers:
            out = kernels(now, case.weights, rows, memory)
            outs.append(out)
            now = Inputs(now.qkv + out.repeat(1, 2)[:, : now.qkv.shape[1]], now.z, now.gates)
        return outs

    scratch = [state_cases.clone(memory) for memory in memories]
    chain(scratch)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = chain(memories)
    for step in range(8):
        for x, source in zip(inputs, case.inputs, strict=True):
            x.copy_(source[step : step + rows.num_tokens])
        rows.starts.copy_(torch.tensor([70 + step * max(1, count - 1)] * num_rows + [0]))
        graph.replay()
        want = chain(others)
        own = num_rows * count
        assert all(torch.equal(x[:own], y[:own]) for x, y in zip(outs, want, strict=True))


def test_a_captured_prompt_follows_the_rows():
    case = Bits(torch.bfloat16, 700)
    rows = state_cases.make_rows([Span(0, 0, 300, 500), Span(1, 0, 1, 0), Span(None, 0, 211, 0)], 6, "cuda")
    inputs, memory, other = Inputs(*(x[:512] for x in case.inputs)), case.memory(), case.memory()
    kernels(inputs, case.weights, rows, case.memory())
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = kernels(inputs, case.weights, rows, memory)
    for spans in (
        [Span(0, 0, 256, 500), Span(1, 0, 1, 0), Span(None, 0, 255, 0)],
        [Span(0, 256, 246, 500, 320, 8), Span(2, 0, 128, 200), Span(None, 0, 138, 0)],
        [Span(1, 1, 9, 0), Span(2, 128, 75, 200), Span(None, 0, 428, 0)],
    ):
        new = state_cases.make_rows(spans, 6, "cuda")
        for name in ("slots", "starts", "q_starts", "places"):
            getattr(rows, name).copy_(getattr(new, name))
        out.fill_(torch.nan)
        graph.replay()
        own = sum(span.count for span in spans[:-1])
        assert torch.equal(out[:own], kernels(inputs, case.weights, new, other)[:own])


def test_a_prompt_has_the_same_bits_beside_others():
    """More programs than multiprocessors take larger blocks of values."""
    length = 200
    case = Bits(torch.bfloat16, length, num_slots=8)
    alone = case.memory()
    [want] = case.step(alone, [Span(0, 0, length, length)])
    together = case.memory()
    for out in case.step(together, [Span(slot, 0, length, length) for slot in range(8)]):
        assert torch.equal(out, want)
    assert torch.equal(together.state[1:9], alone.state[1:2].expand(8, -1, -1, -1))
