"""Work in the background: tasks and futures with results that no caller awaits."""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

logger = logging.getLogger(__name__)

Work = TypeVar("Work", bound="asyncio.Future[Any] | Future[Any]")
_running: set[asyncio.Future[Any] | Future[Any]] = set()  # asyncio itself keeps no task alive


def in_background(work: Work, what: str) -> Work:
    """Keep a task or a future until its end, and log its exception. `what` is the subject of the message."""
    _running.add(work)
    work.add_done_callback(partial(_ended, what))
    return work


def _ended(what: str, work: asyncio.Future[Any] | Future[Any]) -> None:
    _running.discard(work)
    if not work.cancelled() and (error := work.exception()) is not None:
        logger.error("%s failed", what, exc_info=error)
