"""A feed-forward layer's gated activation, act(gate) * up, or act(up) alone. act(x) is x * sigmoid(z(x)).

silu            z = x
gelu_tanh       z = 2 sqrt(2 / pi) (x + 0.044715 x^3), as (1 + tanh(y)) / 2 is sigmoid(2 y)
swiglu_clamped  z = 1.702 x

The last one, gpt-oss's, is act(min(gate, 7)) * (1 + up), with up within a magnitude of 7.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
import torch.nn.functional as F

from runtime.base.model.decoder_spec import ACTIVATION_LIMIT
from runtime.kernels.magnitudes import smaller, within
from runtime.kernels.triton_language import constexpr, jit, tl, use_pdl

Activation = Literal["silu", "gelu_tanh", "swiglu_clamped"]

_GELU_SCALE = 2.0 * math.sqrt(2.0 / math.pi)
_CLAMPED_SCALE = 1.702  # z's factor
_LIMIT = constexpr(ACTIVATION_LIMIT)
_BLOCK = 1024  # columns per program


def gated_activation_torch(gate_up: torch.Tensor, activation: Activation, gated: bool = True) -> torch.Tensor:
    """[num_tokens, 2 * ffn] -> [num_tokens, ffn]; without a gate, [num_tokens, ffn] to the same."""
    gate, *up = gate_up.chunk(2, -1) if gated else (gate_up,)
    if activation == "swiglu_clamped":
        gate = gate.clamp(max=ACTIVATION_LIMIT)
        return (gate * _CLAMPED_SCALE).sigmoid_().mul_(gate).mul_(_plus_one(up[0]))
    out = F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")
    return out.mul_(up[0]) if gated else out


def gated_activation_exact(gate_up: torch.Tensor, activation: Activation, gated: bool = True) -> torch.Tensor:
    """`gated_activation_torch` with bits that do not depend on the number of rows.

    F.silu's vector body and scalar tail differ in the last bit, and the threads' shares of rows decide where the tail
    falls. They agree for exp, and all other operations are exactly rounded."""
    gate, *up = gate_up.float().chunk(2, -1) if gated else (gate_up.float(),)
    if activation == "silu":
        z = gate
    elif activation == "gelu_tanh":
        z = (gate * gate * gate).mul_(0.044715).add_(gate).mul_(_GELU_SCALE)
    else:
        gate, up = gate.clamp(max=ACTIVATION_LIMIT), [_plus_one(up[0])]
        z = gate * _CLAMPED_SCALE
    out = gate / z.neg().exp_().add_(1.0)
    return (out.mul_(up[0]) if gated else out).to(gate_up.dtype)


def _plus_one(up: torch.Tensor) -> torch.Tensor:
    """The factor of swiglu_clamped."""
    return up.clamp(-ACTIVATION_LIMIT, ACTIVATION_LIMIT).add_(1.0)


@jit
def activated(x, ACTIVATION: tl.constexpr):
    """act(x), fp32; explicit fma, so that it rounds the same wherever it is inlined."""
    z = x
    if ACTIVATION == "gelu_tanh":
        z = 1.5957691216057308 * tl.fma(0.044715 * x * x, x, x)  # _GELU_SCALE
    if ACTIVATION == "swiglu_clamped":
        z = 1.702 * x  # _CLAMPED_SCALE
    return x / (1.0 + tl.exp(-z))


@jit
def gated_by(gate, up, ACTIVATION: tl.constexpr):
    """act(gate) * up, fp32."""
    if ACTIVATION == "swiglu_clamped":
        gate = smaller(gate, _LIMIT)
        up = within(up, _LIMIT) + 1.0
    return activated(gate, ACTIVATION) * up


@jit
def _gated_activation_kernel(
    gate_up_ptr,  # [num_tokens, 2 * ffn] contiguous, or [num_tokens, ffn] without GATED
    out_ptr,  # [num_tokens, ffn] contiguous
    ffn,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = cols < ffn
    at = gate_up_ptr + row * (2 * ffn if GATED else ffn) + cols
    gate = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    if GATED:
        out = gated_by(gate, tl.load(at + ffn, mask=inside, other=0.0).to(tl.float32), ACTIVATION)
    else:
        out = activated(gate, ACTIVATION)
    tl.store(out_ptr + row * ffn + cols, out.to(out_ptr.dtype.element_ty), mask=inside)


def gated_activation_triton(gate_up: torch.Tensor, activation: Activation, gated: bool = True) -> torch.Tensor:
    """`gated_activation_torch` as one kernel; an element's bits depend on nothing but its own two inputs."""
    num_tokens, ffn = gate_up.shape[0], gate_up.shape[1] // (2 if gated else 1)
    out = torch.empty((num_tokens, ffn), dtype=gate_up.dtype, device=gate_up.device)
    if num_tokens:
        pdl = use_pdl(gate_up)
        _gated_activation_kernel[(num_tokens, -(-ffn // _BLOCK))](
            gate_up, out, ffn,
            GATED=gated, ACTIVATION=activation, BLOCK=_BLOCK, PDL=pdl, num_warps=4, launch_pdl=pdl,
        )  # fmt: skip
    return out
