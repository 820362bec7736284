"""The processes of a server, as Ray's actors.

Workers of Ray import this first, with the current folder first on their path. From here on, imports of Callboard's
packages find the ones next to this one."""

import os
from importlib.machinery import SourceFileLoader
from types import ModuleType

_start = ModuleType("start")
_start.__file__ = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "runtime", "start.py")
SourceFileLoader("start", _start.__file__).exec_module(_start)
_start.find_own_packages()
