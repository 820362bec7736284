"""Images, as the engine sees them: which ones a step encodes, and where their embeddings are in the runners' pool.

    plan k     encodes A into rows 0..255      a prompt's row reads rows 0..99
    plan k+1                                   its next row reads rows 100..255
    plan k+2   encodes B into rows 0..299      A was used longest ago

Runners apply plans in order, and encode before they run rows. So rows of the pool may be given away while an earlier
plan still reads them (C2). An image must stay for one step only. Beyond that the pool is a cache: a preempted request,
or another one with the same pixels, finds its image again. An image with cached tokens alone needs neither the pool nor
its pixels.

An image is encoded in the step of a row that needs it. If it kills the runners, its request has a row in flight
(policy/isolation.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence, Set
from dataclasses import dataclass

import numpy as np

from runtime.base.arrays import Int32s
from runtime.base.images import Image, ImageInfo, ImageSpan
from runtime.base.model_info import ModelInfo
from runtime.base.types import CallboardError, FinishReason
from runtime.core.extra import Extra
from runtime.core.kv_cache_manager import KVCacheManager
from runtime.core.plan import Encoding
from runtime.core.request_state import RequestState
from runtime.core.settings import Settings
from runtime.core.stats import EngineStats
from runtime.core.step import Step

_Key = tuple[bytes, str]  # digest and cache salt: requests with other salts cannot measure each other's images


@dataclass(slots=True)
class _Placed:
    """An image in a request's prompt."""

    key: _Key
    image: Image
    begin: int
    end: int
    positions: Int32s  # [num_embeddings] positions of the tokens that have its embeddings, in order


class Images(Extra):
    """Serves `images`."""

    serves = frozenset({"images"})

    def __init__(self, info: ModelInfo, config: Settings) -> None:
        self._info = info.images or ImageInfo(-1, 0, 0)
        self._takes_images, self._chunked = info.images is not None, config.chunked_prefill
        budget = config.max_num_batched_tokens or info.max_num_batched_tokens
        self._most_whole = budget + 1 - (config.max_num_seqs or info.max_num_seqs)  # tokens left by decoding rows
        self._pool = RowPool(self._info.pool_rows)
        self._live: dict[RequestState, list[_Placed]] = {}
        # In the step that is being planned:
        self._used: dict[RequestState, list[_Key]] = {}  # images that a row reads
        self._new: dict[_Key, Image] = {}  # images among them that it encodes

    def attach(self, kv_cache: KVCacheManager, stats: EngineStats) -> None:
        self._stats = stats
        # tokens in which a row's images must fit into the pool at once
        self._least_row = kv_cache.least_row if self._chunked else 1 << 62
        assert kv_cache.least_row == 1 or not self._info.stays_whole, "rows of chunks would end within images"

    # ---- a request ------------------------------------------------------------------------------------------------

    def on_add(self, state: RequestState) -> None:
        spans = state.request.images
        if not spans:
            return
        if not self._takes_images:
            raise CallboardError(
                "This engine takes no images; send text alone, or serve a model with an image encoder and images=auto."
            )
        tokens, end = np.frombuffer(state.tokens.tobytes(), np.int32), 0
        for span in spans:
            if not end <= span.begin < span.end < state.prompt_len:
                raise CallboardError(
                    f"An image has the tokens {span.begin} to {span.end} of a prompt with {state.prompt_len}; send "
                    "images in order, apart from each other, and text after the last one."
                )
            end = span.end
        placed = [self._placed(span, tokens, state.request.cache_salt) for span in spans]
        self._check_sizes(placed)
        self._live[state] = placed

    def _placed(self, span: ImageSpan, tokens: Int32s, salt: str) -> _Placed:
        within = np.flatnonzero(tokens[span.begin : span.end] == self._info.token_id)
        if not len(within):
            raise CallboardError(
                f"None of the tokens {span.begin} to {span.end} is {self._info.token_id}, which stands for an image; "
                "send the tokens that the model's image processor makes."
            )
        positions = (within + span.begin).astype(np.int32)
        return _Placed((span.image.digest, salt), span.image, span.begin, span.end, positions)

    def _check_sizes(self, placed: Sequence[_Placed]) -> None:
        """Raises CallboardError for images that no step can hold."""
        rows, size = Counter[int](), self._least_row
        for image in placed:
            for part in {image.begin // size, (image.end - 1) // size}:
                rows[part] += len(image.positions)
        if (most := max(rows.values())) > self._info.pool_rows:
            raise CallboardError(
                f"One step needs {most} embeddings of images, but the runners keep {self._info.pool_rows}; send "
                "smaller images, or start with a larger image_pool_tokens."
            )
        longest = max(image.end - image.begin for image in placed)
        if self._info.stays_whole and self._chunked and longest > self._most_whole:
            raise CallboardError(
                f"An image has {longest} tokens, which one step must compute, but {self._most_whole} fit beside other "
                "requests; send smaller images, or start with a larger max_num_batched_tokens."
            )

    def on_end(self, state: RequestState, reason: FinishReason) -> None:
        self._live.pop(state, None)

    def on_lost(self, in_flight: Set[RequestState]) -> None:
        self._forget()  # the runners' pools are lost

    def on_weights(self) -> None:
        self._forget()  # the encoder may give other embeddings

    def _forget(self) -> None:
        self._pool.clear()
        self._used.clear()
        self._new.clear()

    # ---- a step ---------------------------------------------------------------------------------------------------

    def row_tokens(self, state: RequestState, count: int, step: Step, running: Sequence[RequestState]) -> int:
        """Return the tokens before the first image that is neither in the pool nor encoded in this step."""
        if (images := self._live.get(state)) is None or count <= 0:
            return count
        start, held = state.num_computed, self._settle(step)
        end = start + (self._whole(images, start, count, step) if self._info.stays_whole else count)
        has_encoded, must = bool(self._new), start + self._least_row
        self._used[state] = keys = list[_Key]()
        for image in images:
            if image.end <= start:
                continue
            if image.begin >= end:
                break
            if not self._pool.use(image.key):
                is_more = bool(self._new) and (has_encoded or image.begin >= must)
                if is_more and _decodes(step, running):
                    return max(0, image.begin - start)  # decoding rows wait for one image only
                if not self._pool.place(image.key, len(image.positions), {*held, *keys}):
                    if keys and not held and image.begin < must:  # its other images leave no gap
                        self._forget()
                        return self.row_tokens(state, count, step, running)
                    return max(0, image.begin - start)
                self._new[image.key] = image.image
            keys.append(image.key)
        return end - start

    def _whole(self, images: Sequence[_Placed], start: int, count: int, step: Step) -> int:
        """Return the length of a row that ends in no image: at most `count`, or up to the first image's end."""
        for image in images:
            if image.begin < start + count < image.end:
                if image.begin > start:
                    return image.begin - start
                whole, is_first = image.end - start, step.num_prompts <= (step.overtaking is not None)
                return whole if is_first and whole <= step.budget else 0
        return count

    def _settle(self, step: Step) -> set[_Key]:
        """Drop what was placed for rows that were not planned then. Return the images that the step's rows read."""
        self._used = {state: keys for state, keys in self._used.items() if state in step.rows}
        held = {key for keys in self._used.values() for key in keys}
        for key in self._new.keys() - held:
            del self._new[key]
            self._pool.remove(key)
        return held

    def on_plan(self, step: Step) -> None:
        if not self._live:
            return
        for state, new in zip(step.admitted, step.new, strict=True):
            if state in self._live:
                new.spans = np.array(
                    [(each.begin, each.num_tokens, *each.grid) for each in state.request.images], np.int32
                )
        if not self._used:
            return
        self._settle(step)
        pool = self._pool
        step.plan.encodings = [
            Encoding(image, pool.first_row(key), pool.num_rows(key)) for key, image in self._new.items()
        ]
        firsts = np.cumsum(step.plan.num_tokens) - step.plan.num_tokens
        runs = [run for state in self._used for run in self._runs(state, step, firsts)]
        if runs:
            step.plan.embeds = np.ascontiguousarray(np.concatenate(runs, axis=1), np.int32)
        self._stats.images_encoded += len(self._new)
        self._used.clear()
        self._new.clear()

    def _runs(self, state: RequestState, step: Step, firsts: Int32s) -> list[Int32s]:
        """Return the embeddings that a request's row reads, as in StepPlan.embeds."""
        row, runs = step.rows.index(state), []
        start, end = int(step.plan.num_computed[row]), int(step.plan.ends[row])
        for image in self._live[state]:
            first, last = np.searchsorted(image.positions, (start, end))
            positions = image.positions[first:last]
            if len(positions):
                begins = np.flatnonzero(np.diff(positions, prepend=-2) != 1)
                counts = np.diff(begins, append=len(positions))
                rows = self._pool.first_row(image.key) + first + begins
                runs.append(np.stack((positions[begins] - start + firsts[row], rows, counts)))
        return runs


def _decodes(step: Step, running: Sequence[RequestState]) -> bool:
    """Return True if the step has or will have rows that decode."""
    return step.num_decoding > 0 or any(s.num_total - s.num_computed == 1 for s in running if s not in step.rows)


class RowPool:
    """Rows for embeddings, one range an image. The images used longest ago make room for others."""

    def __init__(self, num_rows: int) -> None:
        self._num_rows = num_rows
        self.clear()

    def clear(self) -> None:
        """Free all rows."""
        self._rows: dict[_Key, range] = {}  # the least recently used image first
        self._free = {0: self._num_rows}  # free ranges, end by begin
        self._free_ends = {self._num_rows: 0}  # begin by end

    def use(self, key: _Key) -> bool:
        """Return True if the image has rows. It is the most recently used one then."""
        if (rows := self._rows.pop(key, None)) is not None:
            self._rows[key] = rows
        return rows is not None

    def first_row(self, key: _Key) -> int:
        """Return the first row of an image in the pool."""
        return self._rows[key].start

    def num_rows(self, key: _Key) -> int:
        """Return the number of an image's rows in the pool."""
        return len(self._rows[key])

    def place(self, key: _Key, count: int, held: Collection[_Key]) -> bool:
        """Give an image `count` rows; images in `held` keep theirs. Return False if it finds no range."""
        begin = next((begin for begin, end in self._free.items() if end - begin >= count), None)
        for other in [each for each in self._rows if each not in held] if begin is None else ():
            free = self.remove(other)
            if len(free) >= count:
                begin = free.start
                break
        if begin is None:
            return False
        end = self._free.pop(begin)
        del self._free_ends[end]
        self._rows[key] = range(begin, begin + count)
        if begin + count < end:
            self._add(begin + count, end)
        return True

    def remove(self, key: _Key) -> range:
        """Free an image's rows. Return the free range that they are in then."""
        rows = self._rows.pop(key)
        begin, end = self._free_ends.pop(rows.start, rows.start), self._free.pop(rows.stop, rows.stop)
        self._free.pop(begin, None)
        self._free_ends.pop(end, None)
        self._add(begin, end)
        return range(begin, end)

    def _add(self, begin: int, end: int) -> None:
        self._free[begin], self._free_ends[end] = end, begin
