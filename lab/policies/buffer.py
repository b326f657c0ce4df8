"""The experience buffer's rules: when it pushes back, what may be overwritten, when a batch is complete.

The buffer is first in, first out, with many producers and consumers. Room is given out when work is *issued*, not when
it comes back: what is in flight counts, so the buffer never holds more than its capacity.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

LINGER_S = 0.25
"""for so long a buffer waits for more samples before it tells what came, where that makes no batch: every answer takes a
call between processes"""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How large the buffer is and how it pushes back."""

    capacity_samples: int
    high_watermark: float = 0.9
    """share of the capacity at which it starts to push back"""
    low_watermark: float = 0.5
    """share at which it stops to"""
    at_high: Literal["pause", "throttle"] = "pause"
    trigger_samples: int = 1
    """a consumer takes so many at once: it pushes back only while these are there or on their way"""


@dataclass(frozen=True, kw_only=True)
class Fill:
    """What the buffer holds and what was promised room."""

    held: int
    """samples that wait in it"""
    pinned: int = 0
    """samples that are being trained on: they take room and cannot be overwritten"""
    in_flight: int = 0
    """samples that were issued and are not back yet"""
    pressed: bool = False
    """whether it pushed back when it was asked last"""

    @property
    def taken(self) -> int:
        """Samples that room is kept for."""
        return self.held + self.pinned + self.in_flight


@dataclass(frozen=True, kw_only=True)
class Pressure:
    """The buffer's answer to producers that want to issue."""

    act: Literal["issue", "pause", "throttle", "resume"]
    """resume: the first `issue` after it pushed back"""
    pressed: bool
    """goes into the next `Fill`"""
    pace: float
    """share of the producers' full pace at which they go on: 0 paused, 1 free"""
    num_issued: int
    """how many of the samples asked for may be issued now"""


def pressure(limits: Limits, fill: Fill, num_wanted: int) -> Pressure:
    """Back-pressure with hysteresis: on at the high watermark, off again only at the low one.

    Throttled producers slow down in proportion to the room that is left above the low watermark. Nobody is held back
    while what waits and what is in flight make no batch, for then the consumer would never make room.
    """
    pressed = _pressed(limits, fill)
    room = max(limits.capacity_samples - fill.taken, 0)
    if not pressed:
        act: Literal["issue", "resume"] = "resume" if fill.pressed else "issue"
        return Pressure(act=act, pressed=False, pace=1.0, num_issued=min(num_wanted, room))
    if limits.at_high == "pause":
        return Pressure(act="pause", pressed=True, pace=0.0, num_issued=0)
    pace = min(room / max(limits.capacity_samples * (1 - limits.low_watermark), 1e-300), 1.0)
    return Pressure(act="throttle", pressed=True, pace=pace, num_issued=min(math.ceil(num_wanted * pace), room))


def _pressed(limits: Limits, fill: Fill) -> bool:
    if fill.held + fill.in_flight < limits.trigger_samples:
        return False
    if fill.pressed:
        return fill.taken > limits.low_watermark * limits.capacity_samples
    return fill.taken >= limits.high_watermark * limits.capacity_samples


def too_small(limits: Limits) -> str | None:
    """Why a buffer can never fill one batch, or None where it can."""
    if limits.capacity_samples < limits.trigger_samples:
        return f"a batch has {limits.trigger_samples} samples and the buffer holds {limits.capacity_samples}"
    return None


@dataclass(frozen=True, kw_only=True)
class Page:
    """A part of the buffer that is filled, trained on and overwritten as a whole."""

    index: int
    num_samples: int = 0
    epochs_left: int = 0
    """epochs that still read it; above 0 it is pinned"""
    full: bool = False

    @property
    def writable(self) -> bool:
        """Whether new samples may be written to it."""
        return self.epochs_left == 0 and not self.full


def filled(page: Page, num_samples: int, page_samples: int) -> Page:
    """The page after samples were written to it. Raises ValueError where they may not be."""
    total = page.num_samples + num_samples
    if not page.writable or total > page_samples:
        raise ValueError(f"page {page.index} takes no {num_samples} more samples: {page}")
    return replace(page, num_samples=total, full=total == page_samples)


def pinned(page: Page, num_epochs: int) -> Page:
    """The page as a data set of `num_epochs` epochs. Raises ValueError where it is in use or not full."""
    if page.epochs_left or not page.full or num_epochs < 1:
        raise ValueError(f"page {page.index} cannot be pinned for {num_epochs} epochs: {page}")
    return replace(page, epochs_left=num_epochs)


def after_epoch(page: Page) -> Page:
    """The page after one more epoch; the last one empties it. Raises ValueError where it was not pinned."""
    if not page.epochs_left:
        raise ValueError(f"page {page.index} is not pinned")
    last = page.epochs_left == 1
    return Page(index=page.index) if last else replace(page, epochs_left=page.epochs_left - 1)


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a batch must hold before the optimizer may have it."""

    batch: int
    num_expected: int
    num_arrived: int = 0
    num_lost: int = 0
    """samples whose loss was recorded: they will not come"""


@dataclass(frozen=True, kw_only=True)
class Publication:
    """Whether a batch goes to the optimizer, and with what gap."""

    publish: bool
    num_missing: int
    """neither arrived nor recorded as lost"""
    num_gap: int = 0
    """recorded losses that the batch is published without"""


def publication(manifest: Manifest, gap: float = 0.0) -> Publication:
    """Publish a batch when every expected sample arrived, or is recorded as lost and those are at most a share `gap`.

    A batch with silent holes is never published. Raises ValueError where more came than was expected.
    """
    missing = manifest.num_expected - manifest.num_arrived - manifest.num_lost
    if missing < 0:
        raise ValueError(f"batch {manifest.batch} has more samples than expected: {manifest}")
    allowed = manifest.num_lost <= gap * manifest.num_expected
    publish = missing == 0 and allowed
    return Publication(publish=publish, num_missing=missing, num_gap=manifest.num_lost if publish else 0)
