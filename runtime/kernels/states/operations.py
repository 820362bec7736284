"""The operations of layers with a state, in place of attention."""

from __future__ import annotations

from runtime.kernels.operation import Operation
from runtime.kernels.states.causal_conv import causal_conv_triton, short_conv_triton
from runtime.kernels.states.causal_conv_torch import causal_conv_torch, short_conv_torch
from runtime.kernels.states.delta_rule import delta_rule_triton
from runtime.kernels.states.delta_rule_torch import delta_rule_torch

CAUSAL_CONV = Operation(causal_conv_torch, triton=causal_conv_triton)
SHORT_CONV = Operation(short_conv_torch, triton=short_conv_triton)
DELTA_RULE = Operation(delta_rule_torch, triton=delta_rule_triton)
