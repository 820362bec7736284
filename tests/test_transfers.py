"""Copies of steps, on a CPU, where they are done when they are asked for."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from runtime.kernels.mail import leave_answer_torch, take_letter_torch
from runtime.worker.mail import Mail
from runtime.worker.transfers import Transfers

CPU = torch.device("cpu")


def test_what_goes_up_keeps_type_and_shape():
    transfers = Transfers(CPU)
    for dtype in (np.int32, np.int64, np.float32):
        parts = [np.arange(n).astype(dtype) for n in (3, 0, 5)]
        assert torch.equal(transfers.upload(*parts), torch.from_numpy(np.concatenate(parts)))
    table = np.arange(12, dtype=np.int32).reshape(3, 4)
    assert torch.equal(transfers.upload(table), torch.from_numpy(table))
    assert transfers.upload(np.zeros((0, 4), np.int32)).shape == (0, 4)


def test_a_step_that_needs_more_memory_keeps_what_it_has():
    transfers = Transfers(CPU)
    transfers.begin()
    kept = [transfers.upload(np.full(n, i, np.int32)) for i, n in enumerate((1, 7000, 20_000, 3, 100_000))]
    assert all((values == i).all() for i, values in enumerate(kept))


def test_results_outlive_the_memory_they_came_through():
    """Steps in flight have memory of their own; that of a step whose result was read is used again."""
    transfers, landings = Transfers(CPU), []
    for round_ in range(20):
        for i in range(3):
            transfers.begin()
            host = transfers.download(torch.full((4,), 10 * round_ + i, dtype=torch.int32))
            landings.append(transfers.end(lambda host=host: host.tolist()))
        with ThreadPoolExecutor(4) as threads:
            got = list(threads.map(lambda landing: landing(), [*landings, *landings]))
        assert got == 2 * [[10 * round_ + i] * 4 for i in range(3)]
        assert [landing() for landing in landings] == got[:3]
        landings = []
    assert len(transfers._free) <= 3


def test_a_page_is_written_again_only_when_its_step_is_over():
    mail, waited = Mail(letter_size=20, answer_size=4, device=CPU), []
    rows, no_runs = np.arange(6, dtype=np.int32), [np.zeros(1, np.int32)]
    for step in range(40):
        mail.write(1, rows + step, no_runs)
        assert waited == list(range(step - 15)), "the step sixteen before this one had the page"
        mail.is_read_by(lambda step=step: waited.append(step))
    answers, taken, state = [], torch.zeros(6, dtype=torch.int32), torch.zeros(9, dtype=torch.int32)
    mail = Mail(letter_size=20, answer_size=6, device=CPU)
    for step in range(40):  # with the device's end, which counts along
        runs = [np.array([1, step % 9, 1], np.int32), np.array([step], np.int32)] if step % 3 else no_runs
        answer = mail.write(2, rows + 100 * step, runs)
        for repeat in range(2):
            take_letter_torch(mail.letters, mail.control, taken, state)
            assert taken.tolist() == [100 * step + i + (repeat if i > 2 else 0) for i in range(6)]
            leave_answer_torch(torch.tensor([step, repeat, 7]).int(), mail.control, taken, mail.answers)
        answers.append(answer.tolist())
        assert not step % 3 or state[step % 9] == step
    assert answers == [[step, 0, 7, step, 1, 7] for step in range(40)]
