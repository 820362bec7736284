"""HostCopies: copies for a step that runs while the host waits. The twin of gpu/transfers.py."""

from __future__ import annotations

import numpy as np
import torch


class HostCopies:
    """Copies to and from one device, often the host itself."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def upload(self, *arrays: np.ndarray) -> torch.Tensor:
        array = arrays[0] if len(arrays) == 1 else np.concatenate([a.reshape(-1) for a in arrays])
        return torch.from_numpy(array).to(self.device)

    def download(self, x: torch.Tensor) -> torch.Tensor:
        return x.cpu()
