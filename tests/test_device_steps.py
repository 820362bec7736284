"""The Triton path of a whole step, from plan to tokens, under the interpreter: its tokens are the torch path's."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

TESTS = Path(__file__).parent


def run_interpreted(code):
    """In a process of its own; `code` is indented."""
    paths = {"PYTHONPATH": os.pathsep.join(map(str, (TESTS, TESTS.parent)))}
    env = os.environ | paths | {"TRITON_INTERPRET": "1"}
    return subprocess.run([sys.executable, "-c", f"if True:{code}"], capture_output=True, text=True, env=env)


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


@pytest.fixture(scope="module")
def finished():
    """What each case's process left, as one runs at a time on each core."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        codes = [f"\n        from triton_engine import *{code}" for code in CASES.values()]
        yield dict(zip(CASES, pool.map(run_interpreted, codes), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_tokens_are_those_of_the_torch_path(case, finished):
    assert finished[case].returncode == 0, finished[case].stderr
