"""Each kernel in a step against the card's ceiling: bytes moved, or operations, over time.

    python -m benchmarks.kernels --model llama-3.2-1b --rows 1 8 64 256
    python -m benchmarks.kernels --only sampling --rows 1 16 48 64 256

Products read each weight once (few rows) or are bound by arithmetic (many). Everything else is bound by memory, and at
few rows by kernel starts. Several launches over different data form one CUDA graph; times are medians over its
replays. Attention alone is in kernels_attention.py, and the ceilings in timing.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from tqdm import tqdm

from benchmarks.kernels.kernels_attention import decode_bytes, decode_seconds
from benchmarks.kernels.timing import BF16_FLOP_S, HBM_BYTES_S, ROTATION_BYTES, graph_seconds
from benchmarks.library.measure import Results, new_parser
from benchmarks.library.models import spec_of
from runtime.base.model.decoder_spec import AttentionSpec, DecoderSpec
from runtime.kernels.attention.rope import HeadForm, rope_rows_triton, rope_store_kv_triton, rope_table
from runtime.kernels.linear.batch_invariant_linear import batch_invariant_linear_triton
from runtime.kernels.linear.skinny_gemm import MAX_ROWS, skinny_gemm_triton
from runtime.kernels.norm.gated_activation import gated_activation_triton
from runtime.kernels.norm.rms_norm import rms_norm_triton
from runtime.kernels.sampling.penalties import NUM_TABLES, penalise_triton
from runtime.kernels.sampling.sample import (
    MIN_P,
    NUM_PARAMS,
    PENALISED_FROM,
    REPETITION,
    SEED_LOW,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    sample_tokens_triton,
)
from runtime.kernels.step.step_inputs import build_inputs

_CONTEXT = 512  # positions that a row attends to


class Case(NamedTuple):
    """`launches` different launches of a kernel, and each launch's least bytes or operations."""

    kernel: str
    launch: Callable[[int], object]
    launches: int
    moved: int  # bytes
    flop: int = 0
    library: Callable[[int], object] | None = None  # the same by cuBLAS


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def products(spec: DecoderSpec, rows: int) -> Iterator[Case]:
    """Each linear layer by each kernel that may serve it."""
    shapes = {"head": (spec.vocab_size, spec.hidden_size)}
    for name, (parts, _) in spec.linears(0).items():
        shapes[name] = sum(size_out for size_out, _ in parts.values()), next(iter(parts.values()))[1]
    kernels: dict[str, Callable] = {"fixed_linear": batch_invariant_linear_triton}
    if rows <= MAX_ROWS:
        kernels["few_rows_linear"] = skinny_gemm_triton
    for (name, (size_out, size_in)), (kernel, product) in itertools.product(shapes.items(), kernels.items()):
        launches = max(2, min(32, ROTATION_BYTES // (2 * size_out * size_in)))
        pairs = [(randn(rows, size_in), randn(size_out, size_in)) for _ in range(launches)]
        yield Case(
            f"{kernel} {name}", _each(product, pairs), launches, 2 * (size_out * size_in + rows * (size_in + size_out)),
            2 * rows * size_out * size_in, _each(F.linear, pairs),
        )  # fmt: skip


def _each(function: Callable, arguments: list[tuple[torch.Tensor, ...]]) -> Callable[[int], object]:
    return lambda i: function(*arguments[i])


def attention_of(spec: DecoderSpec) -> AttentionSpec:
    """The first attention of a model."""
    mixers = (layer.mixer for layer in spec.layers)
    return next(mixer for mixer in mixers if isinstance(mixer, AttentionSpec))


def memory_bound(spec: DecoderSpec, rows: int) -> Iterator[Case]:
    """The kernels between the products, with the bytes that each must move."""
    hidden, ffn, attention = spec.hidden_size, spec.ffn.size, attention_of(spec)
    num_kv_heads, dim = attention.num_kv_heads, attention.head_dim
    weight, x = randn(hidden), randn(rows, hidden)
    yield Case("rms_norm", lambda i: rms_norm_triton(x, weight, 1e-5), 16, 2 * rows * hidden * 2)
    gate_up = randn(rows, 2 * ffn)
    yield Case("gated_activation", lambda i: gated_activation_triton(gate_up, "silu"), 16, 2 * rows * ffn * 3)

    qkv = randn(rows, attention.num_heads + 2 * num_kv_heads, dim)
    kv = randn(2, num_kv_heads, rows + 1, 16, dim)
    positions = torch.arange(rows, device="cuda", dtype=torch.int32)
    rope = rope_rows_triton(rope_table(attention.rope, dim, rows, torch.bfloat16).cuda(), positions)
    form = HeadForm("qkv", randn(dim), randn(dim), 1e-6) if attention.qk_norm == "head" else HeadForm()
    places = positions * 16
    turn = lambda i: rope_store_kv_triton(qkv, rope, kv, places, form)  # noqa: E731
    yield Case("rope_store_kv", turn, 16, 2 * 2 * qkv.numel())

    state = torch.zeros(rows + 1, 8192 + 512, device="cuda", dtype=torch.int32)
    tokens, tables = state.split([8192, 512], 1)
    firsts = torch.arange(rows + 1, device="cuda", dtype=torch.int32)
    inputs = lambda i: build_inputs(positions, positions, firsts, tokens, tables, 16, rows, 1)  # noqa: E731
    yield Case("build_inputs", inputs, 16, 4 * 8 * rows)


def sampling(spec: DecoderSpec, rows: int) -> Iterator[Case]:
    """A step's end. Flat logits, where top-p leaves thousands of tokens, are the filters' worst case."""
    vocab, numbers = spec.vocab_size, torch.arange(rows, device="cuda", dtype=torch.int32)
    state = torch.randint(vocab, (rows + 1, 8192 + NUM_PARAMS), device="cuda", dtype=torch.int32)
    tokens, params = state.split([8192, NUM_PARAMS], 1)
    floats = params.view(torch.float32)
    launches = max(2, min(16, ROTATION_BYTES // (4 * rows * vocab)))
    logits = torch.randn(launches, rows, vocab, device="cuda")
    sampled = {
        "greedy": {},
        "temperature": {TEMPERATURE: 1.0},
        "top-p": {TEMPERATURE: 1.0, TOP_P: 0.9},
        "min-p": {TEMPERATURE: 1.0, MIN_P: 0.05},
        "top-k and top-p": {TEMPERATURE: 1.0, TOP_P: 0.9},
    }
    for (shape, spread), (name, columns) in itertools.product({"flat": 1.0, "peaked": 8.0}.items(), sampled.items()):
        params.zero_()
        floats[:, TOP_P], params[:, SEED_LOW] = 1.0, torch.arange(rows + 1, device="cuda")
        for column, value in columns.items():
            floats[:, column] = value
        params[:, TOP_K] = 50 * ("top-k" in name)
        scaled = logits * spread
        sample = lambda i, x=scaled: sample_tokens_triton(x[i], numbers, numbers, tokens, params)  # noqa: E731
        yield Case(f"sample_tokens, {name}, {shape}", sample, launches, 4 * rows * vocab)
    tables = torch.zeros(NUM_TABLES, vocab, device="cuda", dtype=torch.int32)
    for num_known in (0, 512, 8000):
        floats[:, REPETITION], params[:, PENALISED_FROM] = 1.1, num_known
        at = torch.full_like(numbers, max(1, num_known))
        penalise = lambda i, at=at: penalise_triton(logits[i], numbers, at, tokens, params, False, tables)  # noqa: E731
        yield Case(f"penalties, {num_known} tokens", penalise, launches, 4 * rows * max(1, num_known))


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 8, 64, 256])
    parts = {"products": products, "memory": memory_bound, "sampling": sampling}
    parser.add_argument("--only", nargs="+", choices=[*parts, "attention"], default=[*parts, "attention"])
    args = parser.parse_args()
    spec, results = spec_of(args.model), Results("kernels", args.out)

    for rows in tqdm(args.rows, unit="batch"):
        timed = []
        if "attention" in args.only:
            mixer = attention_of(spec)
            heads = mixer.num_heads, mixer.num_kv_heads, mixer.head_dim
            seconds = decode_seconds([_CONTEXT] * rows, heads)
            moved = decode_bytes([_CONTEXT] * rows, heads)
            timed.append((f"decode_attention, {_CONTEXT} positions", seconds, moved, 0, None))
        for case in itertools.chain.from_iterable(parts[name](spec, rows) for name in parts if name in args.only):
            seconds = graph_seconds(case.launch, case.launches)
            library = case.library and graph_seconds(case.library, case.launches)
            timed.append((case.kernel, seconds, case.moved, case.flop, library))
        for kernel, seconds, moved, flop, library in timed:
            results.add(
                kernel=kernel, model=args.model, cell=rows, us=seconds * 1e6, tb_s=moved / seconds / 1e12,
                tflop_s=flop / seconds / 1e12 if flop else None, library_us=library and library * 1e6,
                of_ceiling=max(moved / HBM_BYTES_S, flop / BF16_FLOP_S) / seconds,
            )  # fmt: skip


if __name__ == "__main__":
    main()
