"""The compiled kernels of layers with states: against the twins, in graphs, and bit for bit between launches."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from runtime.kernels.states.causal_conv import causal_conv_triton
from runtime.kernels.states.delta_rule import delta_rule_triton
from tests.support.kernels import state_cases
from tests.support.kernels.state_cases import QWEN, SMALL, Heads, Inputs, Layers, Span

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")

kernels = state_cases.layer_of(causal_conv_triton, delta_rule_triton)
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
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


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [SMALL, HEADS, QWEN])
def test_steps_and_prompts(heads, dtype):
    layers = Layers(kernels, heads, dtype, device="cuda")
    layers.step([Span(0, 0, 1, 1), Span(1, 0, 64, 70), Span(2, 0, 200, 199, 128, 6), Span(None, 0, 70, 0)])
    layers.step([Span(1, 64, 8, 70), Span(0, 1, 3, 1), Span(3, 0, 192, 400, 192, 7), Span(2, 200, 1, 199)])
    layers.step([Span(3, 192, 128, 400), Span(None, 0, 1, 0), Span(1, 71, 2, 70)])
    layers.step([Span(3, 320, 100, 400, 384, 8), Span(1, 72, 9, 70)])
    layers.step([Span(None, 0, 1, 0), Span(2, 201, 9, 199), Span(1, 75, 9, 70), Span(None, 0, 1, 0)], steps_only=True)
    layers.step([Span(2, 203, 9, 199), Span(1, 80, 1, 70)], steps_only=True)
    layers.step([Span(2, 211, 1, 199), Span(1, 81, 40, 70)])


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_do_not_depend_on_the_cuts_of_a_prompt(dtype):
    length, end = 1003, 1001
    case = Bits(dtype, length)
    whole = case.memory()
    (want,) = case.step(whole, [Span(0, 0, length, end, 704, 7)])
    for cuts in ([0, 64, 192, 704, length], [*range(0, 1001, 64), length]):
        memory, outs = case.memory(), []
        for begin, stop in pairwise(cuts):
            snapshot = (704, 7) if begin < 704 <= stop else (0, 0)
            outs.append(case.step(memory, [Span(0, begin, stop - begin, end, *snapshot)])[0])
        assert torch.equal(torch.cat(outs), want)
        for state, positions, inputs in ((memory.state, memory.positions, memory.inputs),):
            assert torch.equal(state[[1, 7]], whole.state[[1, 7]])
            assert torch.equal(positions[[1, 7]], whole.positions[[1, 7]])
            assert torch.equal(inputs[[1, 7]], whole.inputs[[1, 7]])
    # A snapshot continues with the same bits.
    memory = case.memory()
    memory.state[3], memory.positions[3], memory.inputs[3] = whole.state[7], whole.positions[7], whole.inputs[7]
    assert torch.equal(case.step(memory, [Span(2, 704, length - 704, end)])[0], want[704:])


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_do_not_depend_on_other_rows(dtype):
    case = Bits(dtype, 600)
    spans = [Span(0, 0, 300, 299), Span(1, 0, 64, 500), Span(2, 0, 5, 0), Span(3, 0, 130, 129), Span(4, 0, 1, 0)]
    memory = case.memory()
    together = case.step(memory, spans), case.step(memory, [Span(1, 64, 436, 500), Span(0, 300, 1, 299)])
    memory = case.memory()
    alone = [case.step(memory, [span])[0] for span in spans]
    alone += [case.step(memory, [span])[0] for span in (Span(1, 64, 436, 500), Span(0, 300, 1, 299))]
    assert all(torch.equal(x, y) for x, y in zip(alone, together[0] + together[1], strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_of_verify_rows_are_those_of_single_steps(dtype):
    case = Bits(dtype, 90)
    memory = case.memory()
    case.step(memory, [Span(0, 0, 65, 64)])
    want = [case.step(memory, [Span(0, i, 1, 64)], steps_only=True)[0] for i in range(65, 90)]
    for steps_only in (True, False):
        memory = case.memory()
        case.step(memory, [Span(0, 0, 65, 64)])
        outs, at = [], 65
        for count, accepted in ((9, 4), (9, 9), (2, 1), (9, 0), (1, 1), (5, 5), (5, 5)):
            (out,) = case.step(memory, [Span(0, at, count, 64)], steps_only)
            outs.append(out[:accepted])
            at += accepted
        assert at == 90
        assert torch.equal(torch.cat(outs), torch.cat(want))
    memory = case.memory()  # after a move, all tokens are computed in one row
    (out,) = case.step(memory, [Span(0, 0, 90, 64)])
    assert torch.equal(out[65:], torch.cat(want))


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
