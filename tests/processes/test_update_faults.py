"""Processes are killed while a trainer sends the weights again that the engines have: all tokens are known beforehand.

`python -m benchmarks.faults --when update` does the rest of this column."""

import pytest

from benchmarks.faults.cell import Answers
from tests.support.models.divisible_model import write_divisible_model
from tests.support.processes.fault_cells import NUM_STREAMS, check_cell, deployed


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_divisible_model(tmp_path_factory.mktemp("weights"))


@pytest.fixture(scope="module")
def application(serve_url, folder):
    yield from deployed(folder, serve_url, weight_updates=True, weight_folder=str(folder))


@pytest.fixture(scope="module")
def answers(folder) -> Answers:
    return Answers(str(folder), NUM_STREAMS, 20)


@pytest.mark.rotated
@pytest.mark.one_in(3)
@pytest.mark.parametrize("fault", ["runner killed", "front killed", "trainer killed"])
async def test_faults_lose_no_token_in_updates(application, answers, fault):
    figures = await check_cell(application, answers, fault, "update")
    assert (figures["cut"] > 0) == (fault == "front killed")
    assert figures["updates"] >= 2
