"""Find Callboard's own packages before modules of the same names elsewhere, and run a module that way.

`python -P runtime/start.py PATH MODULE ARGUMENTS` runs a module as `python -m` does, with the folders of PATH added to
the end of the search path. Neither the current folder nor a user's own `runtime.py` takes part. Only the standard
library is imported, since nothing of Callboard is found yet.
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
    """Finds Callboard's packages beside this file; the import system calls it before it searches any path."""

    home = HOME

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """The package's specification; None for every other name."""
        return PathFinder.find_spec(name, [HOME]) if name in PACKAGES else None


def find_own_packages() -> None:
    """From now on, imports of Callboard's packages find them. Raises ImportError if another module has such a name."""
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
    """The command line of a new process that runs a module of Callboard and finds the packages that this one finds."""
    return [sys.executable, "-P", __file__, os.pathsep.join(filter(None, sys.path)), module, *arguments]


def _folders(package: ModuleType) -> list[str]:
    """The folders in which a package lies."""
    return [os.path.dirname(os.path.abspath(place)) for place in getattr(package, "__path__", [])]


if __name__ == "__main__":
    find_own_packages()
    import runpy

    sys.path += [folder for folder in sys.argv[1].split(os.pathsep) if folder not in sys.path]
    del sys.argv[:2]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
