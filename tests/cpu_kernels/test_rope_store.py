"""The compiled rotation and store of keys and values: the bits of the torch twin, whatever the other tokens are."""

import llvmlite.binding as llvm
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.kernels.attention.rope import HeadForm, rope_rows_torch, rope_store_kv_torch
from runtime.kernels.cpu.attention.rope_store import rope_store
from runtime.kernels.cpu.attention.stored_numbers import KVForm
from runtime.kernels.llvm.compiler import assembly, target_of
from tests.support.kernels.compiled import call, targets

TYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.float8_e4m3fn)
POSITIONS, BLOCKS, BLOCK = 50, 9, 7
CASES = [(dtype, head_dim) for dtype in TYPES for head_dim in (64, 24)] + [(TYPES[0], 8), (TYPES[0], 80)]


class Case:
    """A step's q, k and v, and an empty cache."""

    def __init__(self, dtype, head_dim, norms, count=9, num_heads=3, num_kv_heads=2, seed=0):
        generator = torch.Generator().manual_seed(seed)

        def draw(*shape):
            return torch.randn(*shape, generator=generator)

        self.form, self.num_heads, self.eps = KVForm(dtype, head_dim, BLOCK), num_heads, 1e-5
        sizes = draw(count, num_heads + 2 * num_kv_heads, 1).exp()
        self.qkv = draw(count, num_heads + 2 * num_kv_heads, head_dim) * sizes
        self.table = draw(2, POSITIONS, head_dim)
        self.positions = torch.randint(0, POSITIONS, (count,), generator=generator)
        self.index = torch.randperm(BLOCKS * BLOCK, generator=generator)[:count]
        self.kv = torch.zeros(2, num_kv_heads, BLOCKS, BLOCK, head_dim).to(dtype)
        self.norms = (draw(head_dim), draw(head_dim)) if norms else (None, None)
        self.scales = None
        if dtype == torch.int8:
            self.scales = torch.zeros(num_kv_heads, BLOCKS, BLOCK, 2, dtype=torch.float16)
        elif dtype == torch.float8_e4m3fn:
            self.scales = torch.rand(2, num_kv_heads, generator=generator) / 100 + 1e-4

    def run(self, target=None, parts=1, tokens=slice(None)):
        """q, the cache and its scales."""
        wide, kv = self.qkv[tokens].repeat(1, 2, 1), self.kv.clone()  # rows that are part of longer ones
        qkv = wide[:, : self.qkv.shape[1]]
        positions, index = self.positions[tokens].contiguous(), self.index[tokens].contiguous()
        scales = None if self.scales is None else self.scales.clone()
        sizes = len(qkv), self.num_heads, kv.shape[1], qkv.stride(0), self.table.stride(0), BLOCKS * BLOCK
        arguments = qkv, self.table, positions, kv, scales, index, *self.norms, *sizes, self.eps
        constants = {"has_norms": self.norms[0] is not None, "has_v_norm": False, "stores": True}
        call(rope_store, arguments, target, parts, form=self.form, **constants)
        return qkv[:, : self.num_heads], kv, scales

    def expected(self):
        wide = self.scales is None
        kv, scales = self.kv.float() if wide else self.kv.clone(), None if wide else self.scales.clone()
        rope = rope_rows_torch(self.table, self.positions)
        q = rope_store_kv_torch(self.qkv.clone(), rope, kv, self.index, HeadForm("qkv", *self.norms, self.eps), scales)
        return q, kv.to(self.form.dtype), scales


def assert_equal_bits(got, want):
    for a, b in zip(got, want, strict=True):
        if a is not None:
            assert torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


@pytest.mark.parametrize(("dtype", "head_dim"), CASES)
@given(seed=st.integers(0, 999), parts=st.integers(1, 4), zero=st.booleans())
@settings(max_examples=12)
def test_bits_equal_those_of_the_twin(dtype, head_dim, seed, parts, zero):
    case = Case(dtype, head_dim, norms=False, seed=seed)
    if zero:
        case.qkv[2:4] = 0
    case.qkv[5] *= 1e-6
    case.qkv[6] *= 300
    assert_equal_bits(case.run(parts=parts), case.expected())


@pytest.mark.parametrize("head_dim", [64, 24])
def test_norms_equal_those_of_the_twin(head_dim):
    case = Case(torch.float32, head_dim, norms=True, count=40)
    for got, want in zip(case.run()[:2], case.expected()[:2], strict=True):
        torch.testing.assert_close(got, want, rtol=2e-6, atol=2e-6 * float(want.abs().max()))


@pytest.mark.parametrize("dtype", TYPES)
def test_bits_depend_on_the_token_alone(dtype):
    case = Case(dtype, 64, norms=True)
    q, kv, _ = case.run()
    for target in targets():
        assert_equal_bits(case.run(target, parts=5), case.run())
    for token in range(len(q)):
        own_q, own_kv, _ = case.run(tokens=slice(token, token + 1))
        assert torch.equal(own_q[0], q[token])
        block, offset = divmod(int(case.index[token]), BLOCK)
        assert_equal_bits([own_kv[:, :, block, offset]], [kv[:, :, block, offset]])


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("fault", [torch.nan, torch.inf, -torch.inf])
def test_faults_stay_and_stay_with_their_token(dtype, fault):
    case = Case(dtype, 64, norms=False)
    whole = case.run()
    case.qkv[4, :, 9] = fault
    q, kv, scales = case.run()
    others = torch.arange(len(q)) != 4
    assert torch.equal(q[others], whole[0][others])
    assert not q[4].isfinite().all(-1).any()
    block, offset = divmod(int(case.index[4]), BLOCK)
    stored = scales[:, block, offset] if dtype == torch.int8 else kv[:, :, block, offset].float()
    if dtype != torch.float8_e4m3fn or fault is torch.nan:  # infinity becomes the largest number, as in torch
        assert not stored.isfinite().all() if dtype != torch.int8 else not stored.isfinite().any()


def test_code_for_arm_compiles():
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    target = target_of("aarch64-unknown-linux-gnu", "neoverse-n1", "+dotprod")
    constants = {"form": KVForm(torch.int8, 64, 16), "has_norms": True, "has_v_norm": True, "stores": True}
    assert "fmul" in assembly(rope_store, target, **constants)
