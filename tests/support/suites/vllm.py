"""Run vLLM's tests of tool parsers with Callboard's parsers behind them.

    python -m tests.support.suites.vllm FOLDER                passed of run, by file
    python -m tests.support.suites.vllm FOLDER -k lfm2        arguments behind the folder go to pytest

FOLDER is the source package of vllm. Files about vLLM's own functions do not load and are left out.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

_HERE = Path(__file__).parent


def main() -> None:
    folder, *arguments = sys.argv[1:]
    paths = os.pathsep.join([str(_HERE), str(_HERE.parents[2])])
    command = [
        *(sys.executable, "-c", "import sys; sys.path.insert(0, '.'); import pytest; sys.exit(pytest.main())"),
        *("-p", "vllm_stand_in", "-p", "no:cacheprovider", "--noconftest", "-o", "addopts=", "-q", "--tb=line"),
        *("--continue-on-collection-errors", "tests/tool_parsers", *arguments),
    ]
    found = subprocess.run(
        command, cwd=folder, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True, check=False
    )
    lines = found.stdout.splitlines()
    counts = next((json.loads(line)["files"] for line in lines if line.startswith('{"files"')), {})
    for name, (passed, failed) in sorted(counts.items()):
        print(f"{Path(name).stem.removeprefix('test_'):40} {passed:3} of {passed + failed:3}")
    if arguments or not counts:
        print(found.stdout[-8000:], found.stderr[-2000:])


if __name__ == "__main__":
    main()
