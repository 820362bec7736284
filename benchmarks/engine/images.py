"""Time to the first token with a picture, again in the conversation's second turn, and without one.

    python -m benchmarks.engine.images --model smolvlm-256m --sides 512 --set num_threads=2
    python -m benchmarks.engine.images --model qwen3-vl-8b --sides 512 1024

The engine is in this process and has random weights in a published shape. A picture is a square of random pixels,
and not cut into tiles. Figures are medians over the repeats.

    | figure | what |
    | --- | --- |
    | encode_ms, encode_cpu_ms | the image encoder alone; all threads together |
    | first_ms | the first token after a new picture and `--text` tokens |
    | second_ms | the first token of the second turn, which adds as many tokens |
    | text_ms | the same as second_ms, with text in place of the picture |
"""

from __future__ import annotations

import time
from math import isqrt
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from benchmarks.library.measure import Engine, Results, engine_config, middle, new_parser
from runtime.base.images import Image, ImageSpan
from runtime.base.types import Request, SamplingParams

_PARAMS = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)


class Conversations:
    """Conversations of two turns. The first one begins with a picture, or with as many tokens of text."""

    def __init__(self, engine: Engine, side: int, num_text: int) -> None:
        assert engine.runner.images is not None, "the model takes no images"
        self._engine, self._side, self._num_text = engine, side, num_text
        self._tower: Any = engine.runner.images.tower
        self._token_id = engine.runner.images.info.token_id
        self._num_requests = 0

    def timed(self) -> list[float]:
        """Return the milliseconds of each figure, in the table's order."""
        rng = self._engine.rng
        pixels = rng.integers(0, 256, (self._side, self._side, 3), np.uint8).tobytes()
        image = Image(rng.bytes(16), ((self._side, self._side),), pixels)
        begin, begin_cpu = time.perf_counter(), time.process_time()
        num_embeddings = len(self._tower.encode(image, self._upload))
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        encode, encode_cpu = time.perf_counter() - begin, time.process_time() - begin_cpu
        span = ImageSpan(0, num_embeddings, image, (1, isqrt(num_embeddings), isqrt(num_embeddings)))
        first, second = self._turns([self._token_id] * num_embeddings, (span,))
        _, text = self._turns(self._text(num_embeddings), ())
        return [seconds * 1e3 for seconds in (encode, encode_cpu, first, second, text)]

    def _upload(self, pixels: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(pixels).to(self._engine.runner.numerics.device)

    def _turns(self, begin: list[int], images: tuple[ImageSpan, ...]) -> tuple[float, float]:
        """Return the seconds until the first token of each turn."""
        prompt = begin + self._text(self._num_text)
        first, answer = self._answer(prompt, images)
        second, _ = self._answer(prompt + answer + self._text(self._num_text), images)
        return first, second

    def _text(self, length: int) -> list[int]:
        return self._engine.rng.integers(100, self._engine.info.vocab_size - 100, length).tolist()

    def _answer(self, prompt: list[int], images: tuple[ImageSpan, ...]) -> tuple[float, list[int]]:
        """Return the seconds until the first token, and all tokens."""
        self._num_requests += 1
        core, name = self._engine.core, f"image-{self._num_requests}"
        begin, first, answer = time.perf_counter(), 0.0, []
        core.add(Request(name, prompt, len(prompt), _PARAMS, images=images))
        while core.has_work:
            if (output := core.step()) is not None and len(output.token_ids):
                first = first or time.perf_counter() - begin
                answer += [int(token) for token in output.token_ids]
        return first, answer


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--sides", nargs="+", type=int, default=[512], metavar="PIXELS")
    parser.add_argument("--text", type=int, default=100, metavar="TOKENS", help="tokens of text in each turn")
    parser.add_argument("--repeats", type=int, default=5, help="timed pictures of each size, after one to warm up")
    args = parser.parse_args()
    config = engine_config(args.set)
    results, engine = Results("images", args.out), Engine(args.model, config)
    with tqdm(total=len(args.sides) * (args.repeats + 1), unit="picture") as bar:
        for side in args.sides:
            conversations, rows = Conversations(engine, side, args.text), []
            for _ in range(args.repeats + 1):
                rows.append(conversations.timed())
                bar.update()
            names = ("encode_ms", "encode_cpu_ms", "first_ms", "second_ms", "text_ms")
            figures = {
                name: middle(list(times))[0] for name, times in zip(names, zip(*rows[1:], strict=True), strict=True)
            }
            results.add(config, model=args.model, side=side, text=args.text, repeats=args.repeats, **figures)


if __name__ == "__main__":
    main()
