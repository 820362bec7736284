"""Runs choose_kernel under Triton's interpreter with several programs a row, which wait for each other: as processes
that share the memory of its arguments. Their tokens must equal the tokens of one program a row.

    TRITON_INTERPRET=1 OMP_NUM_THREADS=1 python tests/support/kernels/row_programs.py

It runs in a separate process, because it changes the interpreter, and forks before it has threads.
"""

import builtins
import os
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from triton.runtime import interpreter

sys.path.insert(0, str(Path(__file__).parents[3]))

import tests.support.kernels.interpreter  # noqa: F401
from runtime.kernels.sampling import sample
from tests.support.kernels.device_sampler_cases import CPU, make_state

NUM_PROGRAMS = 3  # of a row
SECONDS = 60  # limit of a launch, because a program may hang

# top_k, top_p, min_p: first candidates survive or not, by few tokens or by counts, with one pass or with several.
FILTERS = [(0, 0.9, 0), (0, 0.05, 0), (0, 1.0, 0.3), (5, 0.9, 0), (3000, 0.8, 0), (3000, 1.0, 0), (700, 0.2, 0.05)]
CASES = [(9000, 0.01), (13000, 4.0)]  # tokens of the vocabulary, spread of the logits


class RowPrograms:
    """In a kernel's place: launches it with the grid's rows and NUM_PROGRAMS programs for each."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: tuple[int, int]) -> Any:
        def launch(*args: Any, **options: Any) -> None:
            for tensor in args:
                if isinstance(tensor, torch.Tensor):
                    tensor.untyped_storage().share_memory_()
            programs = [self._fork(part, grid[1], args, options) for part in range(NUM_PROGRAMS)]
            assert not [pid for pid in programs if os.waitpid(pid, 0)[1]], "a program failed, or waits for ever"

        return launch

    def _fork(self, part: int, num_rows: int, args: tuple[Any, ...], options: dict[str, Any]) -> int:
        if pid := os.fork():
            return pid
        signal.alarm(SECONDS)

        def only_part(*bounds: int) -> Any:
            if bounds != (NUM_PROGRAMS,):
                return builtins.range(*bounds)
            interpreter.range = builtins.range
            return [part]

        interpreter.range = only_part  # of the grid's first axis
        self.kernel[(NUM_PROGRAMS, num_rows)](*args, **options)
        os._exit(0)


def main() -> None:
    interpreter.GridExecutor._restore_args_dev = lambda *args: None  # they are arguments already
    rng, kernel = np.random.default_rng(0), sample.choose_kernel
    torch.manual_seed(0)
    for vocab, spread in CASES:
        n = len(FILTERS)
        tokens, params = make_state(n, [0.7, 1.0, 0.3], CPU)
        floats = params.view(torch.float32)
        for row, (top_k, top_p, min_p) in enumerate(FILTERS):
            params[row, sample.TOP_K], floats[row, sample.TOP_P], floats[row, sample.MIN_P] = top_k, top_p, min_p
        logits, slots = torch.randn(n, vocab) * spread, torch.arange(n, dtype=torch.int32)
        state = slots, torch.from_numpy(rng.integers(0, 40, n)).int(), tokens, params
        want = sample.sample_tokens_triton(logits, *state).tolist()
        sample.choose_kernel = RowPrograms(kernel)
        got = sample.sample_tokens_triton(logits, *state).tolist()
        sample.choose_kernel = kernel
        print(vocab, spread, got, flush=True)
        assert got == want, (vocab, spread, want)


if __name__ == "__main__":
    main()
