"""Random quantized weights of every form that kernels multiply."""

from __future__ import annotations

from typing import NamedTuple

import torch

from runtime.kernels.quantized.quantized_weight import QuantizedWeight, quantized_weight
from runtime.kernels.quantized.upcast import E2M1

NF4 = (-1.0, -0.6961928, -0.52507305, -0.39491749, -0.28444138, -0.18477343, -0.09105004, 0.0, 0.0795803, 0.1609302,
       0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0)  # fmt: skip
_SIZES = {"fp8": 64, "int8": 74, "int4": 4.6, "uint4": 4.6, "e2m1": 2.9, "table": 0.6}  # usual size of a value


class Form(NamedTuple):
    code: str
    group: int
    scale_rows: int = 1
    has_zero_points: bool = False


FORMS = {
    "fp8": Form("fp8", 0),
    "fp8-block": Form("fp8", 128, 128),
    "int8": Form("int8", 0),
    "int8-g128": Form("int8", 128),
    "int4": Form("int4", 128),
    "int4-g32": Form("int4", 32),
    "int4-minimums": Form("uint4", 128, 1, True),
    "nf4": Form("table", 64),
    "mxfp4": Form("e2m1", 32),
    "nvfp4": Form("e2m1", 16),
}


def random_weight(form: str, size_out: int, size_in: int, device: str) -> QuantizedWeight:
    """Return a weight that keeps about the size of its inputs."""
    code, group, scale_rows, has_zero_points = FORMS[form]
    is_packed = code not in ("fp8", "int8")
    shape = size_out, size_in // 2 if is_packed else size_in
    if code == "fp8":
        values = torch.randn(shape, device=device).mul_(64).to(torch.float8_e4m3fn)
    else:
        values = torch.randint(0, 256, shape, dtype=torch.uint8, device=device)
        values = values if is_packed else values.view(torch.int8)
    scales = torch.rand((-(-size_out // scale_rows), -(-size_in // group) if group else 1), device=device) + 0.5
    if form == "mxfp4":
        scales = torch.exp2(torch.round(scales)) * 2.0**-8
    else:
        scales = scales.div_(_SIZES[code] * size_in**0.5).bfloat16().float()
    table = {"table": NF4, "e2m1": E2M1}.get(code, ())
    zero_points = scales * 7.5 if has_zero_points else None
    return quantized_weight(code, values, scales, zero_points, group_size=group, scale_rows=scale_rows, table=table)
