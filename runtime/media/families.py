"""Each family's ImageRule, read from a model folder's files."""

from __future__ import annotations

from pathlib import Path

from runtime.media.rule import ImageRule


def image_rule(folder: Path) -> ImageRule | None:
    """Return the rule of a model folder; None for a model that takes no images."""
    raise NotImplementedError(folder)
