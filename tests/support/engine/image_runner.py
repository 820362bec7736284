"""A runner with a pool of embeddings, and a session of prompts with images. An embedding is a hash of digest and index.

A wrong, stale or missing embedding changes every later token. The runner checks the plans' form, too."""

import numpy as np

from runtime.base.images import Image, ImageInfo, ImageSpan
from runtime.base.types import CallboardError
from tests.support.engine.fake_runner import IMAGE, FakeRunner, embedding
from tests.support.engine.sessions import Session
from tests.support.engine.state_runner import StateRunner

LENGTHS = (1, 2, 3, 5, 8, 8, 8)  # embeddings of each image


def image(number: int) -> Image:
    """The fake pixels count the embeddings."""
    return Image(bytes([number + 1]) * 16, ((2, 2),), bytes([number]) * LENGTHS[number])


def tokens_of(number: int) -> list[int]:
    """Return an image's tokens; one image has another token between them, as Mistral's ends of rows."""
    tokens = [IMAGE] * LENGTHS[number]
    return [*tokens[:4], 26, *tokens[4:]] if number == 4 else tokens


def with_images(parts: list[int | list[int]]) -> tuple[list[int], tuple[ImageSpan, ...]]:
    """Return the prompt and the spans for these parts, which are texts and image numbers."""
    prompt, spans = list[int](), list[ImageSpan]()
    for part in parts:
        if isinstance(part, list):
            prompt += part
        else:
            tokens = tokens_of(part)
            spans.append(ImageSpan(len(prompt), len(tokens), image(part), (1, 1, len(tokens))))
            prompt += tokens
    return prompt, tuple(spans)


class ImageRunner(FakeRunner):
    """A runner that encodes images before its rows."""

    def __init__(self, config, info) -> None:
        super().__init__(config, info)
        self.stays_whole = info.images.stays_whole
        self.pool = np.full(info.images.pool_rows, -1, np.int64)
        self.spans: dict[int, list[list[int]]] = {}  # slot -> spans
        self.prompt_lens: dict[int, int] = {}
        self.num_encoded, self.most_beside = 0, 0

    def begin(self, plan) -> None:
        super().begin(plan)
        for slot in plan.freed.tolist():
            self.spans.pop(slot, None)
        self.spans |= {new.slot: new.spans.tolist() for new in plan.new}
        self.prompt_lens |= {new.slot: new.prompt_len for new in plan.new}
        self.embeds = {
            first + i: row + i for first, row, count in plan.embeds.T.tolist() for i in range(count)
        }  # pool row by token index in the step
        assert len(self.embeds) == plan.embeds[2].sum()
        written = set[int]()
        for encoding in plan.encodings:
            pixels, digest = encoding.image.pixels, encoding.image.digest
            assert pixels, "they must have come"
            rows = range(encoding.row, encoding.row + encoding.num_rows)
            assert len(rows) == len(pixels), "as many as the image has tokens"
            assert not written.intersection(rows), "one image overwrites another of its step"
            written.update(rows)
            self.pool[rows] = [embedding(digest, i) for i in range(len(pixels))]
        self.num_encoded += len(plan.encodings)
        rows, new = zip(plan.slots.tolist(), plan.num_computed.tolist(), strict=True), {each.slot for each in plan.new}
        if any(slot not in new and start >= self.prompt_lens[slot] for slot, start in rows):
            self.most_beside = max(self.most_beside, len(plan.encodings))
        self.next_token, self.index_of = 0, {}

    def begin_row(self, slot: int, start: int, count: int) -> None:
        super().begin_row(slot, start, count)
        for at in range(start, start + count):
            self.index_of[slot, at] = self.next_token
            self.next_token += 1
        for begin, length, *grid in self.spans[slot]:
            assert grid == [1, 1, length]
            for at in range(max(begin, start), min(begin + length, start + count)):
                is_mark = self.tokens[slot][at] == IMAGE
                assert (self.index_of[slot, at] in self.embeds) == is_mark
            if self.stays_whole:
                assert not begin < start + count < begin + length, "a row ends within an image"

    def token(self, slot: int, position: int) -> int:
        if (row := self.embeds.pop(self.index_of.get((slot, position), -1), None)) is None:
            return super().token(slot, position)
        assert any(begin <= position < begin + length for begin, length, *_ in self.spans[slot])
        return int(self.pool[row])


class ImageStateRunner(ImageRunner, StateRunner):
    """A runner with images, and recurrent states of the tokens."""


class ImageSession(Session):
    """A Session of a model that takes images."""

    runner_type = ImageRunner

    def __init__(self, pool_rows: int = 16, stays_whole: bool = False, **kw) -> None:
        super().__init__(images=ImageInfo(IMAGE, pool_rows, pool_rows, stays_whole), **kw)
        self.num_encoded = self.most_beside = self.num_refused = 0

    def add(self, prompt, params, priority=0, salt="", images=()) -> str | None:
        if len(prompt) >= self.core.scheduler.max_len + (params.max_tokens == 0):
            return None
        try:
            return super().add(prompt, params, priority, salt, images)
        except CallboardError as e:
            assert "One step needs" in str(e) or "which one step must compute" in str(e)  # noqa: PT017
            self.num_refused += 1
            return None

    def add_parts(self, parts, params, priority=0, salt="") -> str | None:
        prompt, images = with_images(parts)
        return self.add(prompt, params, priority, salt, images)

    def count(self) -> None:
        """Take the counts of the runner."""
        self.num_encoded += self.runner.num_encoded
        self.most_beside = max(self.most_beside, self.runner.most_beside)

    def lose(self) -> None:
        self.count()
        super().lose()

    def finish(self, most: int = 3000) -> None:
        super().finish(most)
        self.count()
        self.runner.num_encoded = 0
