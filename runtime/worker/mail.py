"""The host's end of kernels/mail.py: letters to the graphs of decode steps, and their answers."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

from runtime.core.plan import Int32s
from runtime.kernels.mail import HEAD, leave_answer, take_letter

_NUM_PAGES = 16  # steps that may be in flight


class Mail:
    """Pages of pinned memory, written in turn. A page is used again when the step that it was for is over."""

    def __init__(self, letter_size: int, answer_size: int, device: torch.device) -> None:
        """Sizes of the longest, in ints; of a letter, without its head."""
        on_host = {"dtype": torch.int32, "pin_memory": device.type == "cuda"}
        self.letters = torch.zeros((_NUM_PAGES, HEAD + letter_size), **on_host)
        self.answers = torch.zeros((_NUM_PAGES, answer_size), **on_host)
        self.control = torch.zeros(3, dtype=torch.int32, device=device)
        self._letters: NDArray[np.int32] = self.letters.numpy()
        self._answers: NDArray[np.int32] = self.answers.numpy()
        self._over: list[Callable[[], object]] = [lambda: None] * _NUM_PAGES
        self._page = -1

    def write(self, repeats: int, rows: Int32s, runs: list[Int32s]) -> Int32s:
        """A letter for the next `repeats` replays of a graph. `runs` are their number, as an array, and what
        kernels/staging.py wants after it. Returns where the answer will be when they are done: a copy is to be made."""
        self._page = (self._page + 1) % _NUM_PAGES
        self._over[self._page]()
        letter = self._letters[self._page]
        letter[0], letter[1] = repeats, runs[0][0]
        letter[HEAD : HEAD + len(rows)] = rows
        np.concatenate((runs[0][1:], *runs[1:]), out=letter[HEAD + len(rows) :][: sum(map(len, runs)) - 1])
        return self._answers[self._page]

    def is_read_by(self, wait: Callable[[], object]) -> None:
        """The step of the last letter is over when `wait()` returns."""
        self._over[self._page] = wait

    def take(self, rows: torch.Tensor, state: torch.Tensor) -> None:
        """At the head of a graph: its rows; what the letter changes is written into the state."""
        take_letter(self.letters, self.control, rows, state)

    def leave(self, token_ids: torch.Tensor, rows: torch.Tensor) -> None:
        """At the end of a graph: the answer; the rows move on by a token, for the next replay."""
        leave_answer(token_ids, self.control, rows, self.answers)
