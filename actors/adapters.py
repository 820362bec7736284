"""Names of adapters (LoRA), as the processes of an application agree on them.

Each front and each engine keeps, for every name, what was said of it last: no process's end takes the names along. A
front that is asked to load an adapter, or to unload one, tells all engines; engines tell all their fronts; and who
hears of something older than it knows answers with what it knows. What was said last is what has the highest version.
"""

from __future__ import annotations

import msgspec


class AdapterEntry(msgspec.Struct, array_like=True, frozen=True):
    """The meaning of a name, as somebody has said it."""

    name: str
    path: str  # of its folder, on the engines' nodes; "": nothing has this name any more
    version: int = 0  # when it was said, in nanoseconds, or one more than what it replaces; 0: by the command line


class AdapterState(msgspec.Struct, array_like=True, frozen=True):
    """How far an engine is with what was said of a name last: it is still at it if it has neither digest nor error."""

    entry: AdapterEntry
    digest: str = ""  # of what has the name or, without a path, of what had it, as long as requests use that
    error: str = ""  # why it could not be loaded
    # Of what had the name before: requests may ask for it until its successor is loaded and fronts know that, and go on
    # to if that could not be loaded.
    held: str = ""

    @property
    def is_served(self) -> bool:
        """Requests may ask for it."""
        return bool(self.entry.path and self.digest)

    @property
    def digests(self) -> frozenset[str]:
        """Of what requests may ask for."""
        return frozenset({self.digest, self.held} - {""}) if self.entry.path else frozenset()

    @property
    def is_settled(self) -> bool:
        """The engine has done what was asked."""
        return bool(self.digest or self.error) if self.entry.path else not self.digest
