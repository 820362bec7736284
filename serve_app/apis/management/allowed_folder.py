"""Clients' paths, which must lead into one folder on the server."""

from __future__ import annotations

import os

from runtime.base.types import CallboardError
from runtime.loading.sources.names import cloud_name
from runtime.output.fields import invalid, shortened


def path_within(folder: str, path: str, field: str, what: str) -> str:
    """Return a path without symbolic links, or an address in a bucket.

    A relative path starts in `folder`, the server's folder of `what`. Raises FieldError for `field` if the path is
    outside the folder."""
    try:
        if cloud_name(folder):
            root = folder.rstrip("/")
            found = path if "://" in path else f"{root}/{path}"
            is_within = cloud_name(found) is not None and found.startswith(f"{root}/")
        else:
            root = os.path.realpath(folder)
            found = os.path.realpath(os.path.join(root, path))
            is_within = os.path.commonpath([root, found]) == root
    except (OSError, ValueError, CallboardError):  # not a path, such as one with a null character
        is_within = False
    if not is_within:
        raise invalid(field, f"is {shortened(path)!r}, which is not in this server's folder of {what}")
    return found
