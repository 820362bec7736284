"""Compiled kernels for a CPU that is not at hand: vector instructions, and no calls into a library."""

import re

import llvmlite.binding as llvm
import pytest
import torch

from runtime.kernels.cpu.attention.attention import attention
from runtime.kernels.cpu.attention.rope_store import rope_store
from runtime.kernels.cpu.attention.stored_numbers import KVForm
from runtime.kernels.cpu.linear.dense_product import dense_product
from runtime.kernels.cpu.states.convolution import convolution
from runtime.kernels.cpu.states.delta_rule import delta_inputs, delta_rule
from runtime.kernels.llvm.compiler import assembly, target_of

FLOATS, INT8 = KVForm(torch.float32, 64, 16), KVForm(torch.int8, 64, 16)
PRODUCT = {"dtype": torch.bfloat16, "adds": True, "has_bias": True}
KERNELS = [
    (
        attention,
        "fmla",
        {
            "form": FLOATS,
            "group": 3,
            "window": 0,
            "first_key": 0,
            "soft_cap": 0.0,
            "has_sinks": False,
            "has_images": False,
            "max_heads": 3,
        },
    ),
    (rope_store, "fmul", {"form": INT8, "has_norms": True, "has_v_norm": True, "stores": True}),
    (dense_product, "fmla", {"is_one_row": True, "converts": False, **PRODUCT}),
    (dense_product, "fmla", {"is_one_row": False, "converts": True, **PRODUCT}),
    (delta_rule, "fmla", {"key_dim": 128, "value_dim": 128}),
    (delta_inputs, "fsqrt", {"key_dim": 128}),
    (convolution, "fmul", {"width": 3, "has_bias": False, "gated": True}),
]


@pytest.mark.parametrize(("kernel", "instruction", "constants"), KERNELS)
def test_code_for_arm_compiles(kernel, instruction, constants):
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    text = assembly(kernel, target_of("aarch64-unknown-linux-gnu", "neoverse-n1", "+dotprod"), **constants)
    assert instruction in text
    assert set(re.findall(r"\tbl\t(\w+)", text)) <= {"memset", "memcpy"}
