"""Kernels for quantized weights. A name says activation type, weight type and rows; "n" stands for 4 or 8 bits.

| file | activations | weights | rows | device | torch twin |
| --- | --- | --- | --- | --- | --- |
| `wna16_gemv` | 16 bits: int16 or fp16 inside | int4, uint4, int8, fp8 | 1 | any GPU | `wna16_skinny_gemm_torch` |
| `wna16_skinny_gemm` | bfloat16 | all encodings | 1 to 16 | any GPU | `wna16_skinny_gemm_torch` |
| `wna16_gemm` | bfloat16 | all encodings | 17 to 64; deterministic: all | any GPU | `wna16_gemm_torch` |
| `w4a16_gemm` | bfloat16 | 4 bits | 9 to 256 | Hopper | `wna16_gemm_torch` |
| `int_wna16_gemm` | int16 as two int8 limbs | int8; (u)int4 | 9 to 256; 9 to 128 | Hopper | `int_wna16_gemm_torch` |
| `fp8_w8a8_gemm` | fp8 | fp8 | 2 or more | Hopper | `fp8_w8a8_gemm_torch` |
| `activations` | to fp8 or int16 | | all | any GPU | `quantize_fp8_torch`, `quantize_int16_torch` |
| `weight_conversions` | | dense to fp8; all to dense | | any GPU | `Float8.encode`, `dequantize_torch` |

A weight's encodings are fp8 (e4m3), int8, int4 (symmetric), uint4 (with zero points), e2m1 (fp4) and table (nf4 and
others). Kernels for mixtures of experts are in `runtime/kernels/experts`: `moe_wna16` and `moe_fp8_w8a8`.
`quantized_linear` chooses a kernel for each step, `launch_configs` its tiles. `quantized_weight` holds the weight and
its layout, `upcast` turns values into bfloat16 in registers, `wna16_step` multiplies one step of columns. `word_order`
is a second layout for 4-bit values, for mixtures.
"""
