"""The Triton path of a whole step, from plan to tokens: its tokens are the torch path's."""

import pytest
import torch

from tests.support.kernels.triton_engine import chains, check_tokens, logits_after_chunks, run

pytestmark = pytest.mark.usefixtures("wide_products")


@pytest.mark.thorough
def test_deterministic_tokens_equal_those_of_torch():
    check_tokens(2, deterministic=True)


@pytest.mark.thorough
def test_tokens_equal_those_of_torch():
    check_tokens(2, graphs=True, max_num_seqs=4, max_num_batched_tokens=40, share_right=1.0)


@pytest.mark.thorough
def test_a_plan_of_several_steps():
    """Replayed graphs where samples are plain, step by step where not, and the torch path's loop."""
    want = run("torch", repeats=1)[0]
    assert run("torch", repeats=4)[0] == want
    assert run("triton", repeats=4, graphs=True, max_num_seqs=4)[0] == want


def test_short_chunks_of_a_prompt_on_graphs():
    """Nothing is sampled after them, so nothing may be written where the prompt continues."""
    torch.testing.assert_close(logits_after_chunks("triton"), logits_after_chunks("torch"), rtol=0, atol=1e-4)


@pytest.mark.thorough
def test_a_draft_catches_up_on_graphs():
    """After all guesses were right a row has two tokens; the plan brings the second."""
    assert chains("triton") == chains("torch")
