"""Steps: the state of a runner's requests, and the parts of a step that CpuSteps and GpuSteps share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch

from runtime.core.plan import StepPlan, StepResult
from runtime.models.decoder import Decoder
from runtime.models.forward_batch import Embeds
from runtime.worker.extras import BlockCopier, Copies, ImageEncoder, MaskSource, ReportWriter, SlotKeeper, StepExtra
from runtime.worker.image_positions import ImagePositions
from runtime.worker.kv_cache import KVCache
from runtime.worker.slot_sampling import SlotSampling


class Steps(ABC):
    """Runs plans in the order that runtime/core/plan.py promises:

    free slots -> open slots -> write block tables -> start transfers -> run rows -> sample
    -> keep the tokens in their slots
    """

    asynchronous: ClassVar[bool]  # a step runs while the host does something else
    sampler: SlotSampling

    def __init__(
        self,
        decoder: Decoder,
        cache: KVCache,
        num_slots: int,
        max_model_len: int,
        extras: Sequence[StepExtra] = (),
        masks: MaskSource | None = None,
        encoder: ImageEncoder | None = None,
    ) -> None:
        self.decoder, self.cache = decoder, cache
        self.num_slots, self.max_model_len = num_slots, max_model_len
        self.extras, self.masks, self.encoder = extras, masks, encoder
        self.images = ImagePositions(decoder.spec, num_slots)
        self.layers = cache.layers[: decoder.spec.num_layers]  # a head's follow
        self.head: Any = None  # a StepHead, set once the cache is allocated; None without a head
        self.copier: BlockCopier | None = None  # set for a model with a tier, once the cache is allocated

    @abstractmethod
    def reset(self) -> None:
        """Forget all requests."""
        for keeper in self._keepers():
            keeper.reset()
        if self.copier is not None:
            self.copier.reset()

    def drop_tapes(self) -> None:  # noqa: B027
        """Forget what holds the decoder's weights themselves; addresses may stay."""

    def launch(self, plan: StepPlan) -> Callable[[], StepResult]:
        """Start the step. The returned function waits for its result; on a CPU it computes the step."""
        wait = self._launch(plan)
        return wait if self.copier is None else partial(_with_transfers, wait, self.copier, not len(plan.slots))

    @abstractmethod
    def _launch(self, plan: StepPlan) -> Callable[[], StepResult]:
        """`launch`, without the transfers that have ended."""

    def _keepers(self) -> list[SlotKeeper]:
        optional = [keeper for keeper in (self.masks, self.head) if keeper is not None]
        return [self.sampler, self.images, *self.extras, *optional]

    def _begin_forward(self, plan: StepPlan) -> None:
        for extra in self.extras:
            extra.begin(plan)

    def _embeds(self, plan: StepPlan, firsts: np.ndarray, copies: Copies) -> Embeds | None:
        """Encode the plan's images, and return their embeddings in its rows (ImageEncoder.embeds)."""
        if not plan.has_images:
            return None
        assert self.encoder is not None, "the engine plans images only for a model that takes them"
        return self.encoder.embeds(plan, firsts, copies)

    def _free_and_open(self, plan: StepPlan) -> None:
        """Requests leave their slots, then others enter, with the states of the prefixes that they continue."""
        for slot in plan.freed.tolist():
            for keeper in self._keepers():
                keeper.remove(slot)
        for new in plan.new:
            for keeper in self._keepers():
                keeper.add(new)
            if new.snapshot:
                assert self.cache.states is not None
                self.cache.states.copy(new.snapshot, new.state)

    def _start_transfers(self, plan: StepPlan) -> None:
        if plan.stores is not None or plan.loads is not None:
            assert self.copier is not None, "the engine plans transfers only for a model with a tier"
            self.copier.start(plan)


def _with_transfers(wait: Callable[[], StepResult], copier: BlockCopier, is_rowless: bool) -> StepResult:
    """The result of a step, with the transfers that have ended."""
    result = wait()
    copier.report(result, is_rowless)
    return result


def make_result(step_id: int, token_ids: torch.Tensor, reports: Sequence[ReportWriter]) -> StepResult:
    """The result of a step, from token ids and reports with their data on the host."""
    result = StepResult(step_id, token_ids.numpy().astype(np.int32))
    for report in reports:
        report(result)
    return result
