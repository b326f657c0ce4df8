"""Devices without kernels of their own: those of a measured relative, on their own datasheet.

A profile's kernel curves are multiples of a roofline, so they say how much of its peaks a device reaches at which
size. A relative of the same architecture, or of the nearest one that was measured, reaches about the same shares. That
keeps devices comparable: a bare roofline lacks launches, small kernels and host time, and would make a device that
nobody measured look 20-30 % quicker than its measured twin. Nothing here is measured: all of it counts as extrapolated.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from lab.library import device as library_device

if TYPE_CHECKING:
    from profiles.curve import Curve
    from profiles.profile import Profile

RELATIVES = {
    "a800-80g": "a100-80g-sxm", "a100-80g-pcie": "a100-80g-sxm", "a100-40g-sxm": "a100-80g-sxm",
    "a100-40g-pcie": "a100-80g-sxm", "v100-32g-sxm": "a100-80g-sxm", "h800-80g": "h100-80g-sxm",
    "h100-80g-pcie": "h100-80g-sxm", "h20-96g": "h100-80g-sxm", "mi300x": "h100-80g-sxm", "a10": "l40s",
    "a6000": "l40s", "t4": "l40s",
}  # fmt: skip
"""by device: the one whose kernels stand for its own. A800 and H800 are A100 and H100 with half of the NVLink, H20 is an
H100 with fewer multiprocessors; A10, A6000 and T4 share GDDR memory and PCIe with the L40S; the V100 and the MI300X are
the farthest"""


def transferred(device: str, measured: Profile) -> Profile:
    """A profile of `device` whose kernels reach the shares of peak that those of `measured` reach.

    Collectives of another link are not quicker than a ring over the device's own one.
    """
    from profiles.profile import Profile

    kernels = {name: _wired(name, curve, device, measured.device) for name, curve in measured.kernels.items()}
    source: dict[str, Any] = {
        "method": f"roofline of the {device}, with the efficiencies of the {measured.device}'s kernels",
        "kernels": {name: value for name, value in measured.source.items() if name != "peaks"},
    }
    note = f"no kernel was measured on the {device}: those of the {measured.device} stand, scaled by the two datasheets"
    draft = Profile(
        name=f"{device}-like-{measured.device}", device=device, kind="datasheet", source=source, notes=(note,)
    )
    return draft.model_copy(update={"kernels": kernels})


def _wired(name: str, curve: Curve, device: str, measured: str) -> Curve:
    """A collective's curve on the device's own link; any other curve as it is."""
    own, other = library_device(device).default_link, library_device(measured).default_link
    if "bytes" not in curve.axes or own == other:
        return curve
    import numpy as np

    from lab.library import link
    from profiles.compact import ring
    from profiles.layout import LINK_EFFICIENCY

    op, ranks = name.split(".")
    waits = link(own).latency if _family(own) != _family(other) else 0.0
    least = ring(op, np.array(curve.axes["bytes"]), int(ranks), link(own).bandwidth * LINK_EFFICIENCY, waits)
    values = np.maximum(np.array(curve.values), least)
    return curve.model_copy(update={"values": tuple(float(x) for x in values)})


def _family(link: str) -> str:
    """nvlink3-a800 and nvlink3 are of one family: the same steps, at another bandwidth."""
    return (re.match(r"[a-z]+", link) or [""])[0]
