"""BlockFeatures: the feature of each block's last token, from which a head continues a cached prefix.

A prefix of n tokens ends with a block. The head's entry at position n needs the target's feature of position n - 1, and
no later step computes that position again. The feature depends on the tokens up to it alone, like the block (C5)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from runtime.core.plan import StepPlan


class BlockFeatures:
    """[num_blocks, hidden_size], by the block's id in the head's KV group. `DraftHead.combined` has made them."""

    def __init__(self, num_blocks: int, hidden_size: int, dtype: torch.dtype, device: torch.device, group: int) -> None:
        self.values = torch.zeros((num_blocks, hidden_size), dtype=dtype, device=device)
        self.group = group

    def reset(self) -> None:
        """Forget all blocks."""
        self.values.zero_()

    def forget_loaded(self, plan: StepPlan, upload: Callable[[np.ndarray], torch.Tensor]) -> None:
        """Zero the features of blocks that the plan loads: a tier has keys and values alone."""
        if plan.loads is not None:
            blocks = plan.loads.blocks[plan.loads.groups == self.group]
            self.values.index_fill_(0, upload(blocks.astype(np.int64)), 0)
