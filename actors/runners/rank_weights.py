"""A rank's calls for weight updates. The engine names them by these functions, so mypy checks their arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Protocol, TypeVar

from actors.wire.weight_calls import Applied, SentPart
from runtime.base.types import CallboardError
from runtime.base.weight_parts import GroupInfo
from runtime.base.weight_version import WeightVersion

if TYPE_CHECKING:
    from runtime.worker.extras import WeightUpdates
    from runtime.worker.runner import ModelRunner

P = ParamSpec("P")
T = TypeVar("T")


class CallRanks(Protocol):
    """Calls a method of all ranks at once.

    Returns the results by rank. Raises CallboardError, or RunnersLost if the runners are lost."""

    def __call__(
        self, method: Callable[Concatenate[Any, P], T], *arguments: P.args, **by_name: P.kwargs
    ) -> list[T]: ...


class RankWeights:
    """The updates of one rank."""

    _runner: ModelRunner
    _rank: int

    def weights_connect(self, groups: list[GroupInfo]) -> None:
        """Join a trainer's NCCL group, described for each rank. Waits until all have joined."""
        self._updates.connect(groups[self._rank])

    def weights_disconnect(self) -> None:
        """Leave the trainer's group."""
        self._updates.disconnect()

    def weights_receive(self, part: SentPart) -> None:
        """Stage the tensors in an update's part, while steps continue."""
        from actors.runners.weight_parts import local_part

        self._updates.receive(local_part(part))

    def weights_check(self) -> bool:
        """Return True if the staged tensors are all of the model's."""
        return self._updates.check()

    def weights_apply(self, version: WeightVersion) -> Applied:
        """Take the staged weights, while no plan is computed."""
        return Applied(self._runner.update_weights(version), self._updates.draft_head)

    def weights_store(self) -> None:
        """Write the weights to the store of this node, while steps continue."""
        self._updates.store()

    def weights_discard(self) -> None:
        """Drop the staged tensors. A `weights_receive` that waits ends with an error."""
        self._updates.discard()

    @property
    def _updates(self) -> WeightUpdates:
        updates = self._runner.updates
        if updates is None:
            raise CallboardError("This model runner keeps its weights; start it with weight_updates.")
        return updates
