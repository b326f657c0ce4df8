"""Waiting for calls of actors."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any


async def value(reference: Any) -> Any:
    """What an object reference stands for. Raises what its call raised."""
    return await reference


async def values(references: Iterable[Any]) -> list[Any]:
    """The values of object references; raises as soon as one of them fails."""
    return list(await asyncio.gather(*(value(reference) for reference in references)))


def retrieved(done: asyncio.Future[Any]) -> None:
    """What went wrong is told by whoever awaits it, if anybody still does."""
    if not done.cancelled():
        done.exception()
