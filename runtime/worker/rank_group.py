"""A runner's place in its group: how it reaches the other ranks, and where they wait for each other between steps."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from runtime.core.config import EngineConfig
from runtime.core.decoder_spec import DecoderSpec
from runtime.core.types import CallboardError
from runtime.kernels.communicator import Communicator, OneRank
from runtime.kernels.numerics import Numerics
from runtime.worker.shared_memory import SharedMemory

_MOST_BYTES = 1 << 24  # of an operand that goes in one piece between processes on a CPU
_PATIENCE_S = 3600.0  # of ranks that load; the engine sees to those that do not come


class RankGroup:
    """What one rank shares with the others.

    Steps go through `communicator`. Ranks take different times to load, which its limits do not allow for: `least` is
    where they meet before all of them compute."""

    def __init__(self, config: EngineConfig, spec: DecoderSpec, numerics: Numerics) -> None:
        """`config` is one that is `sized_for` a device."""
        self.communicator: Communicator = OneRank()
        self._meeting: Communicator = OneRank()
        self.handle = b""
        rank, size = spec.shard
        if size > 1:
            if numerics.device.type == "cuda":
                raise CallboardError(f"tensor_parallel_size is {size}; ranks on GPUs are not supported yet.")
            # A step's hidden states go in one piece.
            num_bytes = (config.max_num_batched_tokens or 1) * spec.hidden_size * 4
            tree = numerics.rank_invariant
            self._meeting = SharedMemory(rank, size, 64, timeout_s=_PATIENCE_S)
            self.communicator = SharedMemory(rank, size, min(num_bytes, _MOST_BYTES), tree)
            self.handle = self._meeting.handle + self.communicator.handle

    def connect(self, handles: Sequence[bytes]) -> None:
        """Reach the other ranks, whose handles these are by rank."""
        length = len(self._meeting.handle)
        self._meeting.connect([handle[:length] for handle in handles])
        self.communicator.connect([handle[length:] for handle in handles])

    def least(self, value: int) -> int:
        """The least of the values that all ranks come with; waits for them."""
        return -int(self._meeting.all_max(torch.tensor([-value])))
