"""Compiles for sm_90a, without a GPU, every Triton kernel that serving the benchmarked models launches.

    python tests/support/kernels/hopper_kernels.py [--write]

The steps of runtime.worker.gpu.gpu_steps run on meta tensors, which have shapes and no data. Each launch becomes a
compilation with the same arguments, hints and options as in serving. Prints one JSON line a kernel. It runs in a
separate process, because it replaces Triton's driver.

All compilations take six minutes of one core. So `compiled_kernels.jsonl` keeps their lines by Triton's hash of a
kernel's source, arguments, options and compiler. Only kernels with other hashes are compiled. `--write` brings the file
up to date.
"""

import itertools
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import triton

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT))

from benchmarks.kernels.random_weights import random_weight  # noqa: E402
from benchmarks.library.models import spec_of  # noqa: E402
from runtime.base.model.decoder_spec import ExpertsSpec  # noqa: E402
from runtime.base.types import SamplingParams  # noqa: E402
from runtime.compilation.triton_cache import Compilation, recorded_launches  # noqa: E402
from runtime.core.plan import NewSlot, StepPlan  # noqa: E402
from runtime.kernels import triton_language  # noqa: E402
from runtime.kernels.attention.output_gate import gate_output_triton  # noqa: E402
from runtime.kernels.collectives.all_gather import all_gather_triton  # noqa: E402
from runtime.kernels.collectives.all_reduce import all_reduce_triton  # noqa: E402
from runtime.kernels.collectives.inboxes import NUM_PROGRAMS, STATE_WORDS, Inboxes  # noqa: E402
from runtime.kernels.experts.moe_fp8_w8a8 import Fp8Experts, has_fp8_moe  # noqa: E402
from runtime.kernels.experts.moe_torch import ExpertBiases, Router  # noqa: E402
from runtime.kernels.experts.moe_w16a16 import GroupedExperts  # noqa: E402
from runtime.kernels.experts.moe_wna16 import QuantizedExperts  # noqa: E402
from runtime.kernels.linear import tiles  # noqa: E402
from runtime.kernels.linear.fused_linear import FusedLinear  # noqa: E402
from runtime.kernels.linear.lora import RowAdapters, add_adapters_triton, make_adapters  # noqa: E402
from runtime.kernels.numerics import Numerics  # noqa: E402
from runtime.kernels.quantized.activations import quantize_fp8_triton  # noqa: E402
from runtime.kernels.quantized.fp8_w8a8_gemm import fp8_w8a8_gemm_triton  # noqa: E402
from runtime.kernels.quantized.quantized_linear import Int16Linear, QuantizedLinear  # noqa: E402
from runtime.kernels.quantized.weight_conversions import quantize_fp8_weight_triton  # noqa: E402
from runtime.kernels.sampling.automata import advance_states_triton, mask_states_triton  # noqa: E402
from runtime.kernels.sampling.bitmask import apply_bitmask_triton  # noqa: E402
from runtime.kernels.sampling.pinned import pin_samples  # noqa: E402
from runtime.kernels.sampling.sample import NUM_PARAMS  # noqa: E402
from runtime.kernels.states.causal_conv import causal_conv_triton, short_conv_triton  # noqa: E402
from runtime.kernels.states.delta_rule import delta_rule_triton  # noqa: E402
from runtime.kernels.step.draft_rows import DRAFT_WIDTH, accept_drafts, keep_block_ends, keep_drafts  # noqa: E402
from runtime.kernels.step.state_rows import ConvState  # noqa: E402
from runtime.kernels.step.step_inputs import build_inputs  # noqa: E402
from runtime.kernels.tier.block_runs import BlockRuns, gather_runs_triton, scatter_runs_triton  # noqa: E402
from runtime.kernels.tier.slot_copies import copy_slots_triton  # noqa: E402
from runtime.kernels.tier.slot_sums import slot_sums_triton  # noqa: E402
from runtime.models.decoder_build import build_decoder  # noqa: E402
from runtime.quant.held_weight import HeldWeight, held_dense  # noqa: E402
from runtime.worker.gpu.device_sampler import DeviceSampler  # noqa: E402
from runtime.worker.gpu.gpu_steps import GpuSteps  # noqa: E402
from runtime.worker.gpu.graph_runner import DecodeShape  # noqa: E402
from runtime.worker.gpu.step_rows import MixedShape  # noqa: E402
from runtime.worker.gpu.transfers import Transfers  # noqa: E402
from runtime.worker.kv_cache import KVCache  # noqa: E402
from runtime.worker.ranks.split_logits import SplitLogits  # noqa: E402
from tests.support.kernels import compiled_kernels, state_cases  # noqa: E402
from tests.support.models.specs import changed  # noqa: E402

META = torch.device("meta")
VOCAB_SIZE = 128_256  # of all models: kernels of logits differ in this constant alone
CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
H200 = SimpleNamespace(multi_processor_count=132, name="NVIDIA H200", total_memory=139 << 30)

# Attention of gpt-oss, as fields of a spec.
_SINKS: dict[str, Any] = {"num_heads": 64, "head_dim": 64, "sinks": True, "window": 128}
# (model, changes of its spec, dtype, deterministic, rows of decode steps): a model for each kind of kernel. Models of
# other sizes differ in constants only. SmolLM2's texts are compared in float32. No benchmarked model has the last two
# head sizes; 80 covers all sizes that are padded to 128.
# Layers with heads of 256, and one with heads of 512.
GEMMA_4 = {"num_layers": 6}
SERVED: list[tuple[str, dict[str, Any], torch.dtype, bool, tuple[int, ...]]] = [
    ("llama-3.2-1b", {}, torch.bfloat16, False, (256,)),
    ("llama-3.1-8b", {}, torch.bfloat16, False, (1, 16, 256)),
    ("qwen3-4b", {}, torch.bfloat16, False, (1,)),
    ("llama-3.1-8b", {}, torch.bfloat16, True, (64,)),
    ("llama-3.1-8b", {"kv_cache_dtype": "fp8"}, torch.bfloat16, False, (64,)),
    ("llama-3.1-8b", {"kv_cache_dtype": "int8"}, torch.bfloat16, False, (64,)),
    ("llama-3.2-1b", {"kv_cache_dtype": "fp8"}, torch.bfloat16, True, (1,)),
    ("llama-3.2-1b", _SINKS, torch.bfloat16, False, (64,)),
    ("llama-3.2-1b", _SINKS | {"kv_cache_dtype": "fp8"}, torch.bfloat16, False, (64,)),
    ("smollm2-135m", {}, torch.float32, False, (8,)),
    ("gemma-2-2b", {}, torch.bfloat16, False, (1, 64)),
    ("gemma-4-e2b", GEMMA_4, torch.bfloat16, False, (64,)),
    ("gemma-4-31b", GEMMA_4, torch.bfloat16, True, (64,)),
    ("gemma-4-31b", GEMMA_4 | {"kv_cache_dtype": "int8"}, torch.bfloat16, False, (64,)),
    ("gpt2", {}, torch.bfloat16, False, (1,)),
    ("qwen3-30b-a3b", {}, torch.bfloat16, False, (1,)),
    ("mixtral-8x7b", {}, torch.bfloat16, True, (64,)),
    ("glm-4.7-flash", {}, torch.bfloat16, False, (64,)),
    ("deepseek-v2-lite", {}, torch.bfloat16, True, (64,)),
    ("deepseek-v3", {}, torch.bfloat16, False, (1,)),
    *((model, {"first_key": 1}, torch.bfloat16, False, (64,)) for model in ("llama-3.1-8b", "glm-4.7-flash")),
    *(("qwen3-0.6b", {"head_dim": size}, torch.bfloat16, False, (64,)) for size in (80, 256)),
]
# Tokens of one row, and its sampling: without filters, and with them and a second pass. Models with one size of decode
# steps have the last prefill only.
_AGAIN = {"presence_penalty": 0.5, "logit_bias": ((3, 1.0),)}
PREFILLS = ((300, SamplingParams()), (1024, SamplingParams(**_AGAIN)), (8192, SamplingParams(top_p=0.9, **_AGAIN)))


def resources(cubin: bytes) -> dict[str, int]:
    """Registers and stack bytes of a thread; Triton's kernels use the stack for spilled registers alone."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([CUOBJDUMP, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    words = dict(word.split(":", 1) for word in text.split() if ":" in word)
    return {"registers": int(words["REG"]), "stack": int(words["STACK"])}


def splits_words(kernel: Any) -> bool:
    """True if instructions over words of experts receive bytes that are not four neighbours of a row."""
    if kernel.name != "_moe_wna16_kernel":
        return False
    ttgir = kernel.asm["ttgir"]
    layouts = dict(re.findall(r"^(#\w+) = (.*)$", ttgir, re.M))
    found = re.findall(
        r"elementwise_inline_asm .*} %\S+ : tensor<[\dx]+x(?:i8|f8\w+), (#\w+(?:\.dot_op<.*?>)?)>", ttgir
    )
    for layout in found:
        per_thread = re.search(r"kWidth = (\d+)|sizePerThread = \[.*?(\d+)\]", layouts.get(layout, layout))
        if per_thread is None or max(int(n) for n in per_thread.groups() if n) % 4:
            return True
    return not found


def quantized_layers() -> Iterator[tuple[str, QuantizedLinear, tuple[int, ...]]]:
    """Layers of the formats that are dequantized differently, with numbers of rows."""
    for size_out, size_in, names, rows in (
        (28672, 4096, ["fp8", "int4", "int4-minimums", "nf4"], (1, 64, 256)),
        (4096, 14336, ["int8", "int4"], (8, 16, 128, 512)),
    ):
        for name in names:
            layer = QuantizedLinear(random_weight(name, size_out, size_in, "meta"), None, "silu", False)
            yield f"{name} {size_out}x{size_in}", layer, rows


def inputs(rows: int, size: int) -> torch.Tensor:
    return torch.empty((rows, size), dtype=torch.bfloat16, device=META)


def fp8_products() -> Iterator[tuple[str, Callable[[], Any]]]:
    """Products of rows that are codes: few and many rows of the weight, scales of rows and of blocks; and how a weight
    becomes codes."""
    for size_in in (4096, 28672):
        encode = partial(quantize_fp8_weight_triton, inputs(64, size_in), (448.0, 416.0), 2.0**-100)
        yield f"fp8 of 64x{size_in} torch.bfloat16", encode
    for size_out, size_in, block in ((4096, 14336, 0), (4096, 4096, 128)):
        whole = random_weight("fp8-block" if block else "fp8", size_out, size_in, "meta")
        for rows in (16, 32, 64, 256, 512):
            x, residual = quantize_fp8_triton(inputs(rows, size_in)), inputs(rows, size_out)
            name = f"fp8 rows, {size_out}x{size_in} block {block} torch.bfloat16, {rows} rows"
            yield name, partial(fp8_w8a8_gemm_triton, x, whole, residual=residual)


def integer_products() -> Iterator[tuple[str, Callable[[], Any]]]:
    """Products of rows of digits: few and many rows of the weight."""
    numbers_of = {"int8": (16, 64, 128, 256), "int8-g128": (64, 256), "int4": (16, 64), "int4-minimums": (32, 64)}
    for name, numbers in numbers_of.items():
        for size_out, size_in in ((28672, 4096), (4096, 14336)):
            layer = Int16Linear(random_weight(name, size_out, size_in, "meta"), None, "silu")
            for rows in numbers:
                run = partial(layer.add_to, inputs(rows, size_out), inputs(rows, size_in))
                yield f"{name} by digits, {size_out}x{size_in} torch.bfloat16, {rows} rows", run


def mixtures() -> Iterator[tuple[str, Callable[[], Any]]]:
    """Mixtures of Qwen3-30B-A3B's shape, with fewer experts: with one row a program, and with few and many rows an
    expert."""
    spec, hidden, ffn = ExpertsSpec(16, 8, True, shared=1, shared_gate=True), 2048, 768
    router = Router(FusedLinear(inputs(24, hidden), None, "silu", deterministic=False))
    for form, deterministic, numbers in (
        ("fp8", False, (1, 16, 256)), ("fp8-block", False, (1, 16, 256)), ("int4-minimums", False, (1, 4, 16, 60, 256)),
        ("mxfp4", False, (1, 4, 60, 256)), ("nvfp4", False, (1, 16, 256)), ("nf4", False, (256,)),
        ("int8", False, (1, 60, 256)), ("int8-g128", False, (4, 256)), ("int4", True, (1, 4, 16, 60)),
    ):  # fmt: skip
        pair = random_weight(form, 2 * ffn, hidden, "meta"), random_weight(form, hidden, ffn, "meta")
        kind = Fp8Experts if has_fp8_moe(pair) else QuantizedExperts
        mixture = kind(spec, router, [pair] * 17, "silu", deterministic)
        for rows in numbers:
            name = f"{form} mixture{' deterministic' * deterministic} torch.bfloat16, {rows} rows"
            yield name, partial(mixture.add_to, inputs(rows, hidden), inputs(1, hidden)[0], 1e-5)
    # As gpt-oss, and with the groups of DeepSeek-V3.
    routed = (
        ExpertsSpec(32, 4, False, scores="softmax_of_chosen"),
        ExpertsSpec(256, 8, True, scores="sigmoid", choice_bias=True, groups=8, top_groups=4, group_score="top2"),
    )
    for (form, rows), own in itertools.product((("mxfp4", 1), ("mxfp4", 16), ("mxfp4", 256), ("fp8", 16)), routed):
        pair = random_weight(form, 2 * ffn, hidden, "meta"), random_weight(form, hidden, ffn, "meta")
        linear = FusedLinear(
            inputs(own.num_experts, hidden), inputs(1, own.num_experts)[0], "silu", deterministic=False
        )
        bias = torch.empty(own.num_experts, device=META) if own.choice_bias else None
        kind = Fp8Experts if has_fp8_moe(pair) else QuantizedExperts
        mixture = kind(own, Router(linear, bias), [pair] * own.num_experts, "swiglu_clamped", False)
        mixture.biases = ExpertBiases(inputs(own.num_experts, 2 * ffn), inputs(own.num_experts, hidden))
        name = f"{form} mixture with biases, {own.num_experts} experts, torch.bfloat16, {rows} rows"
        yield name, partial(mixture.add_to, inputs(rows, hidden), inputs(1, hidden)[0], 1e-5)
    yield from dense_mixtures()


def dense_mixtures() -> Iterator[tuple[str, Callable[[], Any]]]:
    """Few choices of GLM-4.7-Flash, with biases and without."""
    spec, hidden, ffn = ExpertsSpec(64, 4, True, shared=1, scores="sigmoid", choice_bias=True), 2048, 1536
    router = Router(FusedLinear(inputs(64, hidden), None, "silu", False), torch.empty(64, device=META), is_wide=True)
    mixture = GroupedExperts(spec, router, [(inputs(2 * ffn, hidden), inputs(hidden, ffn))] * 65, "silu", False)
    for biases in (ExpertBiases(), ExpertBiases(inputs(65, 2 * ffn), inputs(65, hidden))):
        mixture.biases = biases
        name = f"dense mixture{' with biases' * (biases.down is not None)} torch.bfloat16, few choices"
        yield name, partial(mixture.add_to, inputs(1, hidden), inputs(1, hidden)[0], 1e-5)


def adapters() -> Iterator[tuple[str, Callable[[], Any]]]:
    """The adapter kernels for the maps of Llama-3.2-1B and 8B: rows one by one, and tiles of them."""
    rows_of = partial(torch.empty, dtype=torch.int32, device=META)
    for rank, sizes, size_in in ((16, (2048, 512, 512), 2048), (16, (8192, 8192), 2048), (64, (4096,), 14336)):
        stacks = make_adapters(sizes, size_in, 8, rank, torch.bfloat16, META)
        for rows in (1, 64, 1024):
            add = partial(add_adapters_triton, inputs(rows, sum(sizes)), inputs(rows, size_in), rows_of(rows), stacks)
            yield f"rank {rank}, {sizes} of {size_in} torch.bfloat16, {rows} rows", add
        of_row = RowAdapters(rows_of(1), stacks, add_adapters_triton)
        layer = FusedLinear(inputs(sum(sizes), size_in), None, "silu", deterministic=False).with_adapters(of_row)
        normed = partial(layer.normed, inputs(1, size_in), inputs(1, size_in)[0], 1e-5)
        yield f"rank {rank}, {sizes} of {size_in} torch.bfloat16, within the product", normed
    state, row = rows_of((65, 512)), rows_of(64)
    args = row, row, rows_of(65), state, state, 16, 64, 1, None, row
    yield "rows with adapters", partial(build_inputs, *args)


def split_samplers() -> Iterator[tuple[str, Callable[[], Any]]]:
    """The captured pass of a rank of eight, with filters and penalties in its graph, and without."""
    vocab, n = 128_256, 64
    ranks = SimpleNamespace(
        rank=3, size=8, all_max=lambda keys: keys, all_gather=lambda x, wanted: x.new_empty((len(x), 8 * x.shape[1]))
    )
    sampler = DeviceSampler(n, vocab, (), Transfers(META), SplitLogits(vocab, ranks))
    logits = torch.empty((n, vocab // 8), device=META)
    rows, state = (torch.empty(shape, dtype=torch.int32, device=META) for shape in (n, (n + 1, 1024 + NUM_PARAMS)))
    for more in (True, False):
        sample = partial(sampler.sample, logits, rows, rows, state[:, :1024], state[:, 1024:])
        yield f"sampling by a rank of 8, {'all' if more else 'plain'} rows", partial(sample, more, more)


def ranks() -> Iterator[tuple[str, Callable[[], Any]]]:
    """Operations of ranks: partials of a step of one row and of a prompt, in both dtypes, keys and logits."""
    words = partial(torch.empty, dtype=torch.int32, device=META)
    inboxes = {
        size: Inboxes(
            1, size, 32 << 20, torch.empty(size, dtype=torch.int64, device=META), words(NUM_PROGRAMS, STATE_WORDS),
            words(1), words(1),
        )
        for size in (2, 8)
    }  # fmt: skip
    for size, rows, dtype, op in (
        (2, 1, torch.bfloat16, "sum"), (2, 1024, torch.bfloat16, "sum"), (8, 1, torch.bfloat16, "sum"),
        (8, 1024, torch.bfloat16, "sum"), (8, 1, torch.float32, "tree"), (8, 1024, torch.float32, "tree"),
    ):  # fmt: skip
        x = torch.empty((rows, 4096), dtype=dtype, device=META)
        name = f"{size} ranks, {op} of {dtype}, {rows} rows"
        yield name, partial(all_reduce_triton, inboxes[size], x, inputs(rows, 4096), op)
    keys = torch.empty(256, dtype=torch.int64, device=META)
    yield "8 ranks, keys", partial(all_reduce_triton, inboxes[8], keys, None, "max")
    for rows in (1, 256):
        logits = torch.empty((rows, 64128), device=META)
        yield f"2 ranks, logits of {rows} rows", partial(all_gather_triton, inboxes[2], logits, words(rows))


def layers_with_states() -> Iterator[tuple[str, Callable[[], Any]]]:
    """The delta rule of Qwen3.5-9B and a short convolution, in graphs of decode steps and with prompts. And the gate of
    attention's output."""
    x = state_cases.make_inputs(state_cases.QWEN, 64, torch.bfloat16, "meta")
    weights = state_cases.make_weights(state_cases.QWEN, torch.bfloat16, "meta")
    state = state_cases.make_state(state_cases.QWEN, 9, 8, torch.bfloat16, "meta")
    layer = state_cases.layer_of(causal_conv_triton, delta_rule_triton)
    short = inputs(64, 3 * 2048), inputs(2048, 3), None
    for steps_only, count in ((True, 1), (True, 8), (False, 64), (False, 32)):
        spans = [state_cases.Span(None, 0, count, 0)] * (64 // count)
        rows = state_cases.make_rows(spans, 8, "meta", steps_only)
        name = f"torch.bfloat16, {len(spans)} rows{' of steps' * steps_only}"
        yield f"delta rule, {name}", partial(layer, x, weights, rows, state)
        yield (
            f"short convolution, {name}",
            partial(short_conv_triton, *short, rows, ConvState(inputs(9 * 16, 2048).view(9, 16, 2048))),
        )
    yield "gate of attention", partial(gate_output_triton, inputs(64, 4096), inputs(64, 4096))


def tier_copies() -> Iterator[tuple[str, Callable[[], Any]]]:
    """Blocks of Llama-3.1-8B in bf16, scales of int8, and a part of a state, to and from slots of 2 MiB."""
    words = partial(torch.empty, dtype=torch.int64, device=META)
    starts, slots, fits = words(16), words(16, 1 << 18), torch.empty(16, dtype=torch.bool, device=META)
    for num_runs, run, stride in ((512, 512, 1 << 20), (256, 8, 1 << 14), (1, 1 << 18, 0)):
        runs = BlockRuns(words(1 << 20), num_runs, run, stride, run)
        name = f"{num_runs} runs of {8 * run} bytes"
        yield f"{name} to slots", partial(gather_runs_triton, runs, starts, slots, 0)
        yield f"{name} from slots", partial(scatter_runs_triton, runs, starts, slots, 0, fits)
    yield "sums of slots", partial(slot_sums_triton, slots, 1 << 18)
    for to_host in (True, False):
        yield f"small slots, to host {to_host}", partial(copy_slots_triton, slots, starts, 40960, to_host)


def heads() -> Iterator[tuple[str, Callable[[], Any]]]:
    """A head's rows after a step that verifies three draft tokens of each of eight rows."""
    words = partial(torch.empty, dtype=torch.int32, device=META)
    row, samples, tokens, drafts = words(8), words(32), words(65, 512), words(65, DRAFT_WIDTH)
    yield "accepted draft tokens", partial(accept_drafts, row, row, row, samples, row, tokens, drafts, words(4, 8), row)
    yield "next draft tokens", partial(keep_drafts, row, words(4, 8), drafts, 512)
    ends = row, row, row, words(65, 32), 1, 16, inputs(1024, 2048)
    yield "features of block ends", partial(keep_block_ends, inputs(32, 2048), *ends)
    yield "pinned samples", partial(pin_samples, samples, samples, samples, tokens, drafts, 2.8)


def empty_weight(shapes: dict[str, tuple[int, ...]], dtype: torch.dtype, name: str) -> HeldWeight:
    return held_dense(name, torch.empty(shapes[name], dtype=dtype, device=META))


def line_of(kernel: Any) -> dict[str, Any]:
    """What the tests check of a compiled kernel."""
    ptx = kernel.asm["ptx"]
    drops_nan = [more for more in re.findall(r"\b(?:max|min)((?:\.\w+)*)\.f32\b", ptx) if ".NaN" not in more]
    counts = {"wgmma": ptx.count("wgmma.mma_async"), "mma": ptx.count("mma.sync"), "drops_nan": len(drops_nan)}
    shared = {"shared": kernel.metadata.shared, "num_warps": kernel.metadata.num_warps}
    line = {"hash": kernel.hash, "kernel": kernel.name, "splits_words": splits_words(kernel)} | shared
    return line | resources(kernel.asm["cubin"]) | counts


LAUNCHES = (
    fp8_products, integer_products, mixtures, adapters, split_samplers, ranks, layers_with_states, tier_copies, heads,
)  # fmt: skip


def main() -> None:
    compiled_kernels.make_hashes_stable()
    known, seen = compiled_kernels.read(), list[dict[str, Any]]()
    case = ""

    def compile_new(new: Compilation) -> None:
        line = known.get(new.key) or line_of(new.compile())
        assert line["hash"] == new.key, "Triton computes hashes in another way"
        seen.append(line)
        print(json.dumps(line | {"case": case}), flush=True)

    recording = ExitStack()
    recording.enter_context(recorded_launches((9, 0), compile_new))
    triton_language._has_pdl = lambda device: True
    torch.cuda.get_device_properties = lambda device=None: H200
    tiles.multiplies_fp8 = lambda device: True

    for model, given, dtype, deterministic, batches in SERVED:
        of_spec = {field: value for field, value in given.items() if field != "kv_cache_dtype"}
        spec = changed(spec_of(model), **{"num_layers": 1, "vocab_size": VOCAB_SIZE} | of_spec)
        kind = "deterministic" if deterministic else "default"
        name = f"{model} {dtype} {kind}" + "".join(f" {field}={value}" for field, value in given.items())
        numerics = Numerics(dtype, META, "triton", packed=False, deterministic=deterministic)
        decoder = build_decoder(spec, numerics, 16384, partial(empty_weight, spec.shapes(), dtype))
        cache = KVCache(spec.kv_cache(numerics.dtype_name, given.get("kv_cache_dtype", "auto")), 4096, 16, META)
        steps = GpuSteps(decoder, cache, 256, 16384, ())
        steps.kernels.graph_logits = torch.empty((256, spec.vocab_size), dtype=torch.float32, device=META)
        steps.kernels.graph_hidden = torch.empty((256, spec.hidden_size), dtype=dtype, device=META)
        with torch.inference_mode():
            for rows in batches:
                case = f"{name}, decode of {rows}"
                steps.graph_runner.run(DecodeShape(1, rows), steps.kernels.decode)
            case = f"{name}, 7 guesses"
            steps.graph_runner.run(DecodeShape(8, 1), steps.kernels.decode)
            for tokens, params in PREFILLS if len(batches) > 1 else PREFILLS[-1:]:
                case = f"{name}, prefill of {tokens}"
                new = NewSlot(0, np.zeros(tokens, np.int32), tokens, 0, params)
                slot, start, count, one = np.array([[0], [0], [tokens], [1]], np.int32)
                plan = StepPlan(0, new=[new], slots=slot, num_computed=start, num_tokens=count, num_samples=one)
                steps.sampler.add(new)
                upload, slots, shape = steps.transfers.upload, steps.slots, MixedShape.of(plan)
                slots.apply(slots.writes(plan, steps.sampler.rows, steps.images.deltas), upload)
                packed = upload(shape.pack(plan, 256))
                *_, after, sampled, positions = shape.split(packed)
                logits = decoder.logits(steps.kernels.forward(shape, packed, False).index_select(0, after))
                token_ids = steps.kernels.sample(logits, sampled, positions, params.top_p < 1, True)
                steps.sampler.resample(logits, token_ids, slot, count, slots.tokens, slots.params)
            case = f"{name}, grammars"
            sizes = ((1,), (1, -(-spec.vocab_size // 32)), (4, 8), (256, 4), (256,), (1 << 20,))
            at, words, *automata = (torch.empty(size, dtype=torch.int32, device=META) for size in sizes)
            apply_bitmask_triton(logits, at, words)
            mask_states_triton(logits, *automata)
            advance_states_triton(token_ids, *automata)

    for name, layer, numbers in quantized_layers():
        size_in = layer.quantized.shape[1]
        norm = torch.empty(size_in, dtype=torch.bfloat16, device=META)
        for rows in numbers:
            case = f"{name} torch.bfloat16, {rows} rows"
            layer.normed(inputs(rows, size_in), norm, 1e-5)

    for case, run in itertools.chain.from_iterable(make() for make in LAUNCHES):  # noqa: B007
        run()
    if "--write" in sys.argv:
        compiled_kernels.write(seen)


if __name__ == "__main__":
    main()
