"""The Triton path of a whole step, from plan to tokens, under the interpreter: its tokens are the torch path's."""

import pytest

CASES = {
    "deterministic": """
        check_tokens(2, deterministic=True)
    """,
    "graphs": """
        check_tokens(2, graphs=True, max_num_seqs=4, max_num_batched_tokens=100, share_right=1.0)
    """,
    # Replayed graphs where samples are plain, step by step where not, and the torch path's loop.
    "a plan of several steps": """
        want = run("torch", repeats=1)[0]
        assert run("torch", repeats=4)[0] == want
        got = run("triton", repeats=4, graphs=True, max_num_seqs=4)[0]
        assert got == want, (want, got)
    """,
    # Nothing is sampled after them, so nothing may be written where the prompt goes on.
    "short chunks of a prompt on graphs": """
        torch.testing.assert_close(logits_after_chunks("triton"), logits_after_chunks("torch"), rtol=0, atol=1e-4)
    """,
    # After all guesses were right a row has two tokens, of which the plan brings the second.
    "a draft catches up on graphs": """
        want, got = chains("torch"), chains("triton")
        assert got == want, (want, got)
    """,
}


def case(name):
    code = f"if True:\n        from tests.support.triton_engine import *{CASES[name]}"
    return pytest.param(id=name, marks=pytest.mark.interpreted("-c", code))


@pytest.mark.slow
@pytest.mark.parametrize((), [case(name) for name in CASES])
def test_tokens_are_those_of_the_torch_path(interpreted):
    assert interpreted.returncode == 0, interpreted.stderr
