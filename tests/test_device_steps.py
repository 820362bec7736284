"""The Triton path of a whole step, from plan to tokens, under the interpreter: its tokens are the torch path's."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent


def run_interpreted(code):
    paths = {"PYTHONPATH": os.pathsep.join(map(str, (TESTS, TESTS.parent)))}
    command, env = [sys.executable, "-c", code], os.environ | paths | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "guesses"),
    [
        ("deterministic=True", 2),
        ("graphs=True, max_num_seqs=4, max_num_batched_tokens=100, share_right=1.0", 2),
    ],
)
def test_tokens_are_those_of_the_torch_path(config, guesses):
    code = f"""if True:
        from triton_engine import run
        *want, want_values = run("torch", {config})
        *got, values = run("triton", {config}, answers=want[0], guesses={guesses})
        assert got == want, (want, got)
        assert [len(scores) for scores in got[2].values()] == [2, 30]
        assert max(abs(a - b) for a, b in zip(values, want_values, strict=True)) < 1e-4
        print("prompt tokens from the cache:", got[1])
    """
    assert int(run_interpreted(code).split()[-1]) > 0, "the prefix cache took no part"


@pytest.mark.slow
def test_a_plan_of_several_steps_gives_the_tokens_of_single_ones():
    """Replayed graphs where samples are plain, step by step where not, and the torch path's loop."""
    code = """if True:
        from triton_engine import run
        want = run("torch", repeats=1)[0]
        assert run("torch", repeats=4)[0] == want
        got = run("triton", repeats=4, graphs=True, max_num_seqs=4)[0]
        assert got == want, (want, got)
    """
    run_interpreted(code)


@pytest.mark.slow
def test_a_draft_catches_up_on_graphs():
    """After all guesses were right a row has two tokens, of which the plan brings the second."""
    run_interpreted("""if True:
        from triton_engine import chains
        want, got = chains("torch"), chains("triton")
        assert got == want, (want, got)
    """)
