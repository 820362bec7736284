"""The kernels of a layer with the gated delta rule: decode steps against the bytes of their states, and prompts.

    python -m benchmarks.kernels.states --rows 1 8 64 --tokens 8192

A decode step reads and writes the state of each row once. Launches of different layers form one CUDA graph, so that
states come from memory; times are medians of its replays.
"""

from __future__ import annotations

import torch
from tqdm import tqdm

from benchmarks.kernels.timing import HBM_BYTES_S, ROTATION_BYTES, graph_seconds
from benchmarks.library.measure import Results, new_parser
from runtime.kernels.states.causal_conv import causal_conv_triton
from runtime.kernels.states.delta_rule import delta_rule_triton
from tests.support.kernels.state_cases import (
    Heads,
    Inputs,
    Layer,
    Span,
    layer_of,
    make_inputs,
    make_rows,
    make_state,
    make_weights,
)

_HEADS = {
    "qwen3.5-9b": Heads(16, 32, 128, 128),
    "qwen3.6-35b-a3b": Heads(16, 32, 128, 128),
    "qwen3.6-27b": Heads(16, 48, 128, 128),
}
_START = 1000  # of decode rows


def layer_seconds(layer: Layer, heads: Heads, spans: list[Span], steps_only: bool) -> float:
    """Seconds of one layer's kernels. In decode steps, each launch has a state and a ring of its own."""
    slots = max(span.slot or 0 for span in spans) + 1
    rows = make_rows(spans, slots, "cuda", steps_only)
    weights = make_weights(heads, torch.bfloat16, "cuda")
    weights = weights._replace(conv=weights.conv.t().contiguous().t())  # by taps
    bytes_of_states = 4 * slots * heads.value_heads * heads.key_dim * heads.value_dim
    launches = max(3, min(24, ROTATION_BYTES // bytes_of_states)) if steps_only else 3
    states = [make_state(heads, slots + 1, slots, torch.bfloat16, "cuda") for _ in range(launches)]
    inputs: list[Inputs] = [make_inputs(heads, rows.num_tokens, torch.bfloat16, "cuda") for _ in range(launches)]
    for state in states:
        for tensor in (state.inputs, state.state, state.keys, state.values):
            tensor.normal_()
        state.decays.fill_(0.9)
        state.positions.fill_(_START - 2)  # the state before the last update, as in each step of a request
    return graph_seconds(lambda i: layer(inputs[i], weights, rows, states[i]), launches)


def main() -> None:
    parser = new_parser(__doc__, model=False)
    parser.add_argument("--models", nargs="+", choices=_HEADS, default=["qwen3.5-9b", "qwen3.6-27b"])
    parser.add_argument("--rows", nargs="*", type=int, default=[1, 8, 64], help="of decode steps")
    parser.add_argument("--draft-tokens", nargs="*", type=int, default=[0, 3], help="of each row")
    parser.add_argument("--tokens", nargs="*", type=int, default=[1024, 8192], help="of a prompt")
    args = parser.parse_args()
    results = Results("kernels_states", args.out)
    layer = layer_of(causal_conv_triton, delta_rule_triton)
    for model in tqdm(args.models, unit="model"):
        heads = _HEADS[model]
        for rows in args.rows:
            for draft in args.draft_tokens:
                spans = [Span(slot, _START, 1 + draft, 0) for slot in range(rows)]
                seconds = layer_seconds(layer, heads, spans, steps_only=True)
                moved = 2 * 4 * rows * heads.value_heads * heads.key_dim * heads.value_dim
                results.add(
                    model=model, cell=f"{rows} rows, {draft} draft tokens", us=seconds * 1e6,
                    tb_s=moved / seconds / 1e12, of_ceiling=moved / seconds / HBM_BYTES_S,
                )  # fmt: skip
        for tokens in args.tokens:
            seconds = layer_seconds(layer, heads, [Span(0, 0, tokens, tokens)], steps_only=False)
            results.add(model=model, cell=f"prompt of {tokens}", us=seconds * 1e6, tokens_s=tokens / seconds)


if __name__ == "__main__":
    main()
