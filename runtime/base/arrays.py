"""Types of host arrays."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Int32s = NDArray[np.int32]
Float32s = NDArray[np.float32]
