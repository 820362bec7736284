"""Launch configurations that benchmarks/kernels/tune_linear.py measured on an H200; other shapes use a rule."""

from __future__ import annotations

from typing import NamedTuple


class SkinnyGemmConfig(NamedTuple):
    """How `skinny_gemm` cuts a weight [N, K]: a program has block_n rows and the whole of K."""

    block_n: int
    block_k: int  # columns a step; more rows: in each chunk of the weight's `sum_order`
    num_warps: int
    stages: int = 1  # one row: steps in flight, 1 or 2; more rows: stages of the software pipeline
    ahead: int = 1  # more rows: steps, 1 or 2, of weights requested before the wait for the previous kernel


SKINNY_GEMM_CONFIGS: dict[tuple[int, int, int], SkinnyGemmConfig] = {  # (N, K, most rows)
    (2048, 2048, 1): SkinnyGemmConfig(8, 1024, 4, 1, 1),
    (2048, 2048, 8): SkinnyGemmConfig(16, 128, 4, 4, 1),
    (2048, 2048, 16): SkinnyGemmConfig(16, 128, 4, 4, 2),
    (2048, 8192, 1): SkinnyGemmConfig(4, 2048, 8, 1, 1),
    (2048, 8192, 8): SkinnyGemmConfig(16, 128, 4, 4, 2),
    (2048, 8192, 16): SkinnyGemmConfig(16, 128, 4, 4, 2),
    (2560, 4096, 1): SkinnyGemmConfig(2, 1024, 2, 1, 1),
    (2560, 4096, 8): SkinnyGemmConfig(16, 128, 4, 4, 2),
    (2560, 4096, 16): SkinnyGemmConfig(16, 128, 4, 4, 1),
    (2560, 9728, 1): SkinnyGemmConfig(8, 1024, 4, 1, 1),
    (2560, 9728, 8): SkinnyGemmConfig(16, 128, 4, 4, 2),
    (2560, 9728, 16): SkinnyGemmConfig(16, 128, 4, 4, 1),
    (3072, 2048, 1): SkinnyGemmConfig(4, 1024, 4, 1, 1),
    (3072, 2048, 8): SkinnyGemmConfig(16, 128, 2, 6, 2),
    (3072, 2048, 16): SkinnyGemmConfig(16, 256, 2, 4, 1),
    (3072, 3072, 1): SkinnyGemmConfig(4, 1024, 2, 2, 1),
    (3072, 3072, 8): SkinnyGemmConfig(16, 128, 2, 6, 2),
    (3072, 3072, 16): SkinnyGemmConfig(16, 256, 2, 3, 1),
    (3072, 8192, 1): SkinnyGemmConfig(4, 1024, 4, 2, 1),
    (3072, 8192, 8): SkinnyGemmConfig(16, 256, 2, 3, 2),
    (3072, 8192, 16): SkinnyGemmConfig(16, 256, 2, 3, 1),
    (4096, 4096, 1): SkinnyGemmConfig(4, 1024, 4, 1, 1),
    (4096, 4096, 8): SkinnyGemmConfig(16, 256, 2, 4, 1),
    (4096, 4096, 16): SkinnyGemmConfig(16, 128, 2, 6, 2),
    (4096, 14336, 1): SkinnyGemmConfig(4, 4096, 8, 1, 1),
    (4096, 14336, 8): SkinnyGemmConfig(16, 128, 2, 6, 2),
    (4096, 14336, 16): SkinnyGemmConfig(16, 128, 2, 6, 2),
    (5120, 3072, 1): SkinnyGemmConfig(4, 512, 1, 2, 1),
    (5120, 3072, 8): SkinnyGemmConfig(16, 256, 2, 3, 1),
    (5120, 3072, 16): SkinnyGemmConfig(32, 64, 2, 6, 2),
    (6144, 2560, 1): SkinnyGemmConfig(4, 512, 1, 2, 1),
    (6144, 2560, 8): SkinnyGemmConfig(16, 512, 1, 3, 1),
    (6144, 2560, 16): SkinnyGemmConfig(64, 128, 4, 4, 2),
    (6144, 4096, 1): SkinnyGemmConfig(4, 1024, 1, 1, 1),
    (6144, 4096, 8): SkinnyGemmConfig(32, 256, 2, 4, 2),
    (6144, 4096, 16): SkinnyGemmConfig(32, 256, 2, 3, 2),
    (16384, 2048, 1): SkinnyGemmConfig(4, 512, 1, 1, 1),
    (16384, 2048, 8): SkinnyGemmConfig(32, 128, 2, 4, 2),
    (16384, 2048, 16): SkinnyGemmConfig(64, 128, 4, 3, 2),
    (16384, 3072, 1): SkinnyGemmConfig(2, 1024, 1, 1, 1),
    (16384, 3072, 8): SkinnyGemmConfig(32, 128, 2, 4, 2),
    (16384, 3072, 16): SkinnyGemmConfig(64, 128, 4, 3, 2),
    (19456, 2560, 1): SkinnyGemmConfig(4, 512, 2, 2, 1),
    (19456, 2560, 8): SkinnyGemmConfig(32, 128, 2, 4, 1),
    (19456, 2560, 16): SkinnyGemmConfig(32, 128, 2, 4, 1),
    (28672, 4096, 1): SkinnyGemmConfig(2, 2048, 4, 1, 1),
    (28672, 4096, 8): SkinnyGemmConfig(32, 128, 2, 4, 2),
    (28672, 4096, 16): SkinnyGemmConfig(128, 64, 4, 4, 2),
    (128256, 2048, 1): SkinnyGemmConfig(2, 1024, 2, 1, 1),
    (128256, 2048, 8): SkinnyGemmConfig(32, 128, 2, 4, 2),
    (128256, 2048, 16): SkinnyGemmConfig(64, 128, 4, 4, 1),
    (128256, 3072, 1): SkinnyGemmConfig(4, 1024, 4, 1, 1),
    (128256, 3072, 8): SkinnyGemmConfig(32, 256, 2, 3, 2),
    (128256, 3072, 16): SkinnyGemmConfig(64, 128, 4, 4, 1),
    (128256, 4096, 1): SkinnyGemmConfig(2, 2048, 4, 1, 1),
    (128256, 4096, 8): SkinnyGemmConfig(32, 256, 2, 3, 2),
    (128256, 4096, 16): SkinnyGemmConfig(128, 64, 4, 4, 2),
    (151936, 2560, 1): SkinnyGemmConfig(4, 512, 1, 2, 1),
    (151936, 2560, 8): SkinnyGemmConfig(64, 128, 4, 3, 2),
    (151936, 2560, 16): SkinnyGemmConfig(64, 128, 4, 4, 1),
}
