"""A tape is complete only if torch computes and copies nothing while it is recorded."""

import pytest
import torch

from runtime.worker.cpu.decode_tapes import _Operations

X = torch.arange(12.0).view(3, 4)


@pytest.mark.parametrize(
    ("operation", "copies"),
    [
        (lambda: X[:, :2].contiguous(), True),
        (lambda: X[:, :2].reshape(-1), True),
        (lambda: X.to(torch.bfloat16), True),
        (lambda: X.to(torch.float32, copy=True), True),
        (lambda: X + 1, True),
        (lambda: X.contiguous(), False),
        (lambda: X.to(torch.float32), False),
        (lambda: X.view(-1), False),
        (lambda: X[1:].split(1), False),
        (lambda: torch.empty(3), False),
    ],
)
@pytest.mark.parametrize("inference", [True, False])
def test_copies_are_noted(operation, copies, inference):
    with torch.inference_mode(inference), _Operations() as operations:
        operation()
    assert bool(operations.computed) == copies
