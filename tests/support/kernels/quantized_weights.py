"""Random quantized weights of every format."""

import torch

from runtime.kernels.quantized.quantized_weight import QuantizedWeight, pack_planes, plane_of, quantized_weight
from runtime.kernels.quantized.upcast import E2M1

NF4 = (-1.0, -0.6962, -0.5251, -0.3949, -0.2844, -0.1848, -0.0911, 0.0, 0.0796, 0.1609, 0.2461, 0.3379, 0.4407, 0.5626,
       0.7230, 1.0)  # fmt: skip
FORMS = [("fp8", 0, 1), ("fp8", 128, 128), ("int8", 0, 1), ("int8", 32, 1), ("int8 minimums", 128, 1),
         ("int8 minimums", 0, 1), ("int4", 0, 1), ("int4", 128, 1), ("int4", 64, 1), ("int4", 32, 1), ("int4", 256, 1),
         ("uint4 minimums", 128, 1), ("uint4 minimums", 64, 1), ("uint4 minimums", 32, 1), ("table", 64, 1),
         ("e2m1", 32, 1), ("int4", 16, 1)]  # fmt: skip


def some_weight(form: tuple[str, int, int], size_out: int, size_in: int) -> QuantizedWeight:
    """All codes in turn; scales of many magnitudes, some of them zero. Of 4 bits, with whole planes of columns."""
    (name, *more), group, scale_rows = form[0].split(), *form[1:]
    if name not in ("fp8", "int8"):
        size_in = -(-size_in // (2 * plane_of(group))) * 2 * plane_of(group)
    order = torch.arange(size_in) + 37 * torch.arange(size_out)[:, None]
    match name:
        case "fp8":
            data = order.to(torch.uint8)
            codes = data.where(data & 127 != 127, 0).view(torch.float8_e4m3fn)
        case "int8":
            codes = order.to(torch.int8)
        case _:
            codes = (order + order // 16).to(torch.uint8) & 15
    if name not in ("fp8", "int8"):
        codes = pack_planes(codes, plane_of(group))
    shape = -(-size_out // scale_rows), -(-size_in // group) if group else 1
    scales = torch.rand(shape) * 0.02
    scales[-1, 0] = 0
    table = {"table": NF4, "e2m1": E2M1}.get(name, ())
    minimums = torch.rand(shape) * 0.1 if more else None
    return quantized_weight(name, codes, scales, minimums, group_size=group, scale_rows=scale_rows, table=table)
