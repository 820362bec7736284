"""WeightVersion: which weights an engine serves."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WeightVersion:
    """A version of an engine's weights. Engines with equal identities have the same weights."""

    serial: int = 0  # updates before it; 0 is the checkpoint
    name: str = "default"  # what clients see; trainers choose it
    identity: str = ""  # hash over the updates since the last complete one; empty for the checkpoint

    def after(self, update_id: str, name: str | None, is_complete: bool) -> WeightVersion:
        """Return the version after an update, which `update_id` names on all engines.

        Without a `name` it is one more than the last name if that is a number, else the serial number. `is_complete`:
        the update has every tensor of the model, so older versions do not matter."""
        before = "" if is_complete else self.identity
        identity = hashlib.sha256(f"{before}\0{update_id}".encode()).hexdigest()[:32]
        number = int(self.name) if self.name.isdecimal() else self.serial
        return WeightVersion(self.serial + 1, str(number + 1) if name is None else name, identity)

    def satisfies(self, wanted: str) -> bool:
        """Return True for a request that wants at least the version `wanted`.

        Names that are numbers are compared as numbers; other names must be equal. An empty one wants nothing."""
        if wanted.isdecimal() and self.name.isdecimal():
            return int(self.name) >= int(wanted)
        return wanted in ("", self.name)

    def fingerprint(self, base: str) -> str:
        """Return the fingerprint of a model with these weights, from that with the checkpoint's."""
        if not self.identity:
            return base
        return hashlib.sha256(f"{base}\0{self.identity}".encode()).hexdigest()[:32]
