"""RankGroup: how a runner reaches the other ranks of its group, and how they wait for each other between steps."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from runtime.base.config import EngineConfig
from runtime.base.model.decoder_spec import DecoderSpec
from runtime.kernels.collectives.communicator import TIMEOUT_S, Communicator, OneRank
from runtime.kernels.numerics import Numerics
from runtime.worker.ranks.peer_memory import Memory, PeerMemory, inbox_bytes_of
from runtime.worker.ranks.shared_memory import SharedMemory

_MOST_BYTES = 1 << 24  # operand that is sent in one piece between processes on a CPU
_WARM_UP_S = 60.0  # limit for waits in steps before the first plan, while ranks on GPUs compile kernels
_PATIENCE_S = 3600.0  # limit for waits while ranks load; the engine handles ranks that fail


class RankGroup:
    """The connections of one rank to the others.

    Steps use `communicator`. Ranks take different times to load, longer than its limits allow, so they first wait for
    each other in `barrier`."""

    def __init__(
        self, config: EngineConfig, spec: DecoderSpec, numerics: Numerics, memory: Memory | None = None
    ) -> None:
        """`config` is `sized_for` a device. `memory` replaces the driver's memory that peers reach."""
        self.communicator: Communicator = OneRank()
        self._meeting: Communicator = OneRank()
        self.handle = b""
        rank, size = spec.shard
        if size > 1:
            # A step's hidden states are sent in one piece, and so is a logits row.
            num_bytes = 4 * max((config.max_num_batched_tokens or 1) * spec.hidden_size, spec.whole.vocab_size)
            tree, device = numerics.rank_invariant, numerics.device
            self._meeting = SharedMemory(rank, size, 64, timeout_s=_PATIENCE_S)
            if numerics.backend == "triton" and device.type == "cuda":
                self.communicator = PeerMemory(
                    rank, size, inbox_bytes_of(size, num_bytes), device, tree, timeout_s=_WARM_UP_S, memory=memory
                )
            else:
                self.communicator = SharedMemory(rank, size, min(num_bytes, _MOST_BYTES), tree)
            self.handle = self._meeting.handle + self.communicator.handle

    def connect(self, handles: Sequence[bytes]) -> None:
        """Reach the other ranks. `handles` has the handle of each rank."""
        length = len(self._meeting.handle)
        self._meeting.connect([handle[:length] for handle in handles])
        self.communicator.connect([handle[length:] for handle in handles])

    def open(self) -> None:
        """The first plan may arrive: ranks have built everything."""
        self.communicator.set_timeout(TIMEOUT_S)

    def barrier(self) -> None:
        """Wait for all ranks."""
        self.least(0)

    def least(self, value: int) -> int:
        """The smallest value of all ranks; waits for them."""
        return -int(self._meeting.all_max(torch.tensor([-value])))
