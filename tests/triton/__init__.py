"""Kernels under Triton's interpreter, which is made faster in every process that imports a test, a rank's included."""

import os

INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"

if INTERPRETING:
    import tests.support.kernels.interpreter  # noqa: F401
