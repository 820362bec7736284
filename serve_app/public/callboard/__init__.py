"""Callboard's library: a model in this process, and the settings and results that go with it.

from callboard import LLM, SamplingParams

for answer in LLM("Qwen/Qwen3-0.6B").generate(["Once upon a time"], SamplingParams(max_tokens=64)):
    print(answer.text)

Callboard's packages `runtime`, `actors` and `serve_app` are found in their own place, even next to your own
`runtime.py`. After `import callboard` these names are Callboard's in the whole process."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from importlib.machinery import SourceFileLoader
from types import ModuleType

TYPE_CHECKING = False  # typing takes long to import
if TYPE_CHECKING:
    from types import TracebackType
    from typing import Any

    from actors.client import Rollout, RolloutClient
    from runtime.base.config import EngineConfig
    from runtime.base.types import CallboardError, FinishReason, SamplingParams, TokenLogprobs
    from runtime.llm import LLM, Completion
    from runtime.text.tool_calls import CallDelta

    __version__: str


def _report_ctrl_c(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print one line for a Ctrl-C that comes while the command loads; other errors have their traceback."""
    if issubclass(kind, KeyboardInterrupt):
        print("callboard: interrupted", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, trace)


if os.path.basename("".join(sys.argv[:1])) == "callboard" or (sys.argv[:1] == ["-m"] and "callboard" in sys.orig_argv):
    sys.excepthook = _report_ctrl_c  # set only in the command, before other modules load

__all__ = [
    "LLM",
    "CallDelta",
    "CallboardError",
    "Completion",
    "EngineConfig",
    "FinishReason",
    "Rollout",
    "RolloutClient",
    "SamplingParams",
    "TokenLogprobs",
    "__version__",
]

_PLACES = {  # name -> the module that has it; loaded with the first use
    "LLM": "runtime.llm",
    "CallDelta": "runtime.text.tool_calls",
    "CallboardError": "runtime.base.types",
    "Completion": "runtime.llm",
    "EngineConfig": "runtime.base.config",
    "FinishReason": "runtime.base.types",
    "Rollout": "actors.client",
    "RolloutClient": "actors.client",
    "SamplingParams": "runtime.base.types",
    "TokenLogprobs": "runtime.base.types",
}


def _find_own_packages() -> None:
    """Call `find_own_packages` of `runtime/start.py`, which a plain import would look for on the user's path."""
    folder = os.path.dirname(os.path.realpath(__file__))  # next to the packages in an install, below them in a checkout
    while not os.path.isfile(place := os.path.join(folder, "runtime", "start.py")):
        if folder == (folder := os.path.dirname(folder)):
            raise ImportError(f"{__file__} lies apart from Callboard's other packages; install it again.")
    start = ModuleType("start")
    start.__file__ = place
    SourceFileLoader("start", place).exec_module(start)
    start.find_own_packages()


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        value: Any = version("callboard")
    elif name in _PLACES:
        value = getattr(import_module(_PLACES[name]), name)
    else:
        raise AttributeError(f"module 'callboard' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__


_find_own_packages()
