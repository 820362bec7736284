"""Every Triton kernel in the forms that serving launches, compiled for sm_90a. It fits the card's limits, does not
spill, and uses tensor cores where it should. It runs in a separate process, without a GPU."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

pytestmark = pytest.mark.thorough

ROOT = Path(__file__).parents[2]
SHARED_BYTES = 232_448  # of one block on sm_90
# Kernel -> bytes a thread may spill with Triton 3.6 to 3.9; all others none. Spills that measured faster than smaller
# tiles. Attention over heads of 128 and products of a few rows hold more values than there are registers;
# layers that hide position 0 have one loop more. For experts with many rows, two programs share a multiprocessor's
# registers; of chunks of the delta rule, three. States of 64 values spill with the newest Triton, not with 3.6. Rows of
# 28,672 values are quantized whole while a model is loaded.
STACK_BUDGET = {
    "_decode_attention_kernel": 128, "_prefill_attention_kernel": 160, "_tile_kernel": 136,
    "_wna16_skinny_gemm_kernel": 8, "_moe_wna16_kernel": 64, "_quantize_fp8_weight_kernel": 120,
    "_prepare_chunks_kernel": 240, "_carry_state_kernel": 96, "_latent_attention_kernel": 136, "_vector_kernel": 8,
}  # fmt: skip
# Kernels in which `max.f32` may drop a NaN because another operation keeps it: the weights of attention, the check of
# logits that samples -1. These are all NaN by then.
DROPS_NAN = {
    "_decode_attention_kernel", "_prefill_attention_kernel", "_best_of_tile_kernel", "choose_kernel",
    "_latent_attention_kernel", "_merge_latents_kernel", "_merge_found_kernel",
}  # fmt: skip


@pytest.fixture(scope="module")
def compiled() -> list[dict]:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "support" / "kernels" / "hopper_kernels.py")],
        env=environment, cwd=ROOT, capture_output=True, text=True, timeout=1100,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_no_kernel_is_left_out(compiled):
    sources = (path.read_text() for path in (ROOT / "runtime" / "kernels").rglob("*.py"))
    defined = {name for source in sources for name in re.findall(r"^@jit(?:\(.*\))?\ndef (\w+_kernel)\(", source, re.M)}
    assert {kernel["kernel"] for kernel in compiled} == defined


def test_shared_memory_fits(compiled):
    assert not [k for k in compiled if k["shared"] > SHARED_BYTES]


def test_nothing_spills_beyond_its_budget(compiled):
    assert not [k for k in compiled if k["stack"] > STACK_BUDGET.get(k["kernel"], 0)]


def test_experts_upcast_whole_words(compiled):
    assert not [k for k in compiled if k.get("splits_words")]


def test_maxima_and_bounds_keep_nan(compiled):
    assert {k["kernel"] for k in compiled if k["drops_nan"]} <= DROPS_NAN


@pytest.mark.parametrize(
    ("kernel", "instructions"),
    [
        ("_prefill_attention_kernel", ["wgmma"]),
        ("_product_kernel", ["wgmma"]),
        ("_fp8_w8a8_gemm_kernel", ["wgmma"]),
        ("_moe_fp8_w8a8_kernel", ["wgmma"]),
        ("_latent_attention_kernel", ["mma", "wgmma"]),  # wgmma where a tile has 64 rows
        ("_head_product_kernel", ["mma", "wgmma"]),
        ("_decode_attention_kernel", ["mma", "wgmma"]),  # eight rows of eight heads a KV head fill a whole group
        ("_tile_kernel", ["mma", "wgmma"]),  # wgmma where a program has 64 rows of the weight
        ("_wna16_skinny_gemm_kernel", ["mma"]),
        ("_wna16_gemm_kernel", ["wgmma"]),
        ("_moe_wna16_kernel", ["mma", "wgmma"]),  # wgmma where experts have many rows
        ("_shrink_tile_kernel", ["mma"]),
        ("_expand_tile_kernel", ["mma"]),
        ("_prepare_chunks_kernel", ["wgmma"]),
        ("_carry_state_kernel", ["wgmma"]),
    ],
)
def test_products_of_16_bit_types_use_tensor_cores(compiled, kernel, instructions):
    forms = [k for k in compiled if k["kernel"] == kernel and "bfloat16" in k["case"]]
    assert forms
    others = [k for k in forms if not any(k[i] for i in instructions)]
    if kernel == "_prefill_attention_kernel":  # quantized heads of 512 leave no room for the registers of wgmma
        others = [k for k in others if not (k["mma"] and "gemma-4" in k["case"] and "kv_cache_dtype" in k["case"])]
    assert not others
