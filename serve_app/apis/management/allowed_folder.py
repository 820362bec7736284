"""Paths of clients, which must lead into one folder of the server."""

from __future__ import annotations

import os

from runtime.output.fields import invalid, shortened


def path_within(folder: str, path: str, field: str, what: str) -> str:
    """Return a path without symbolic links. A relative one starts in `folder`, the server's folder of `what`.

    Raises FieldError for `field` if the path is outside the folder."""
    try:
        root = os.path.realpath(folder)
        found = os.path.realpath(os.path.join(root, path))
        is_within = os.path.commonpath([root, found]) == root
    except (OSError, ValueError):  # not a path, such as one with a null character
        is_within = False
    if not is_within:
        raise invalid(field, f"is {shortened(path)!r}, which is not in this server's folder of {what}")
    return found
