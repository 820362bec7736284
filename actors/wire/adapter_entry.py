"""Adapter names (LoRA), as an application's processes agree on them.

Each front and each engine stores the newest entry of every name, so no process's end loses a name. A front that gets a
request to load or unload an adapter sends the new entry to all engines, and engines send it to all their fronts. The
highest version wins: a process that receives an older entry replies with its newer one."""

from __future__ import annotations

import msgspec

MAX_NAMES = 1024  # names that a front stores, including entries without a folder
FORGET_AFTER_S = 600  # entries without a folder are dropped then; a process that was cut off for longer may revive them


class AdapterEntry(msgspec.Struct, array_like=True, frozen=True):
    """The meaning of a name."""

    name: str
    path: str  # its folder on the engines' nodes; empty if the name was unloaded
    version: int = 0  # wall clock in ns, or one more than the replaced entry's; 0 if it comes from the command line

    def is_older(self, now_ns: int) -> bool:
        """True if it is older than FORGET_AFTER_S."""
        return now_ns - self.version > FORGET_AFTER_S * 1_000_000_000


class AdapterState(msgspec.Struct, array_like=True, frozen=True):
    """The state of a name's newest entry on one engine. Without a digest and an error, the adapter is loading."""

    entry: AdapterEntry
    digest: str = ""  # the adapter's digest; after an unload, the one that running requests still use
    error: str = ""  # why it could not be loaded; empty if it could
    # Digest of the name's previous adapter; empty if there is none. Requests may use it until its successor is loaded
    # and the fronts have received that, and longer if the successor fails to load.
    held: str = ""
    is_setting: bool = False  # the command line names it, too, so its entry is never dropped.
    # Last uses of this engine's idle adapters, in ns of the wall clock by digest; None unless this one lacked a place.
    idle: dict[str, int] | None = None

    @property
    def is_served(self) -> bool:
        """True if requests may use it."""
        return bool(self.entry.path and self.digest)

    @property
    def digests(self) -> frozenset[str]:
        """Digests of the adapters that requests may use."""
        return frozenset({self.digest, self.held} - {""}) if self.entry.path else frozenset()

    @property
    def is_settled(self) -> bool:
        """True if the engine has applied the entry, or has failed to."""
        return bool(self.digest or self.error) if self.entry.path else not self.digest
