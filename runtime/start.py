"""Finds Callboard's own packages before other modules of the same names, and runs a module with this order.

`python -P runtime/start.py PATH MODULE ARGUMENTS` runs a module as `python -m` does, with PATH's folders added to
the end of the search path. The current folder and a user's own `runtime.py` are ignored. This module
imports only the standard library, because Callboard's packages cannot be found yet.
"""

from __future__ import annotations

import os
import sys
from importlib.machinery import PathFinder

TYPE_CHECKING = False  # typing takes long to import
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

PACKAGES = ("runtime", "actors", "serve_app")
HOME = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))  # the folder that holds the packages


class OwnPackages:
    """Finds Callboard's packages next to this file. The import system calls it before it searches any path."""

    home = HOME

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Return the package's specification; None for other names."""
        return PathFinder.find_spec(name, [HOME]) if name in PACKAGES else None


def find_own_packages() -> None:
    """Make imports find Callboard's packages. Raises ImportError if another module already has such a name."""
    for name in PACKAGES:
        if (module := sys.modules.get(name)) is not None and HOME not in _folders(module):
            place = getattr(module, "__file__", None) or "of unknown origin"
            raise ImportError(
                f"The module {name!r} ({place}) is loaded, and Callboard has a package of this name; "
                f"rename that module."
            )
    if not any(getattr(finder, "home", None) == HOME for finder in sys.meta_path):
        sys.meta_path.insert(0, OwnPackages)


def command(module: str, *arguments: str) -> list[str]:
    """Return the command line for a new process that runs a Callboard module with this process's packages."""
    return [sys.executable, "-P", __file__, os.pathsep.join(filter(None, sys.path)), module, *arguments]


def _folders(package: ModuleType) -> list[str]:
    """Return the folders of a package."""
    return [os.path.dirname(os.path.abspath(place)) for place in getattr(package, "__path__", [])]


if __name__ == "__main__":
    find_own_packages()
    import runpy

    sys.path += [folder for folder in sys.argv[1].split(os.pathsep) if folder not in sys.path]
    del sys.argv[:2]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
