"""The error that a user can act on."""

from __future__ import annotations


class CallboardError(Exception):
    """A fault that a user can fix. Its text is one sentence: the value at fault and the change to make."""
