"""DecodeTapes: decode steps with few rows as kernel tapes, the counterpart of a GPU's CUDA graphs.

The first step with each number of rows records the decoder's calls. Later steps write their inputs to the same
memory and run the tape: Python does nothing between two kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from runtime.kernels.attention.tiled_rows import TiledRows
from runtime.models.decoder import Decoder
from runtime.models.forward_batch import ForwardBatch
from runtime.worker.kv_cache import KVCache

if TYPE_CHECKING:  # they import llvmlite, which only CPUs need
    from runtime.kernels.llvm.launcher import Launcher
    from runtime.kernels.llvm.pool import Tape

MAX_ROWS = 16  # rows in a tape; with more, the time between kernels matters little


@dataclass(frozen=True, slots=True)
class _Recorded:
    """A tape with its inputs and results."""

    tape: Tape
    batch: ForwardBatch
    hidden: torch.Tensor
    logits: torch.Tensor


class DecodeTapes:
    """The tapes of one decoder."""

    def __init__(self, decoder: Decoder, cache: KVCache, launcher: Launcher) -> None:
        self.decoder, self.cache, self.launcher = decoder, cache, launcher
        self._recorded: dict[int, _Recorded] = {}
        self._is_complete = True  # false if the decoder has operations that are not kernels

    @property
    def sizes(self) -> list[int]:
        """The numbers of rows that have tapes."""
        return sorted(self._recorded)

    def takes(self, num_rows: int) -> bool:
        """True if steps of this many rows may run as tapes."""
        return self._is_complete and num_rows <= MAX_ROWS

    def run(self, batch: ForwardBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """The hidden states [n, hidden] and the logits [n, vocab] of decode rows, valid until the next step."""
        found = self._recorded.get(len(batch.token_ids))
        if found is None:
            return self._record(batch)
        own = found.batch
        own.token_ids.copy_(batch.token_ids)
        own.positions.copy_(batch.positions)
        for (own_index, tiled), (index, new_tiled) in zip(own.groups, batch.groups, strict=True):
            assert isinstance(tiled, TiledRows)
            assert isinstance(new_tiled, TiledRows)
            own_index.copy_(index)
            tiled.tiles.copy_(new_tiled.tiles)
        if own.states is not None and batch.states is not None:
            own.states.slots.copy_(batch.states.slots)
            own.states.starts.copy_(batch.states.starts)
        self.launcher.replay(found.tape)
        return found.hidden, found.logits

    def _record(self, batch: ForwardBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Run a step and keep its calls, if they are all that it computes."""
        with self.launcher.record() as tape, _Operations() as operations:
            hidden = self.decoder.forward(batch, self.cache.layers[: self.decoder.spec.num_layers])
            logits = self.decoder.logits(hidden)
        self._is_complete = not operations.computed
        if self._is_complete:
            self._recorded[len(batch.token_ids)] = _Recorded(tape, batch, hidden, logits)
        return hidden, logits


class _Operations(TorchDispatchMode):
    """Notes whether torch computes anything; views and new tensors do not count."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.computed: set[str] = set()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No: to skip it, torch would import it, which takes seconds."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        # Inference mode does not decompose `contiguous` and its like: they count as views, but may copy.
        is_view = func.is_view and _shares_memory(result, args[0])
        if not (is_view or func.name().startswith("aten::empty")):
            self.computed.add(func.name())
        return result


def _shares_memory(result: Any, source: torch.Tensor) -> bool:
    """True if the tensor, or each tensor in a list, is a view of `source`."""
    results = [result] if isinstance(result, torch.Tensor) else result
    memory = source.untyped_storage().data_ptr()
    return all(each.untyped_storage().data_ptr() == memory for each in results)
