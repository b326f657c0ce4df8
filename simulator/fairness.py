"""Max–min fair shares of link capacity: progressive filling.

All flows grow together until a link is full; the flows on it stop, the others grow on (Bertsekas and Gallager, Data
Networks, 6.5.2). A link whose share is the least that any of its flows is offered can be settled at once, whatever
happens elsewhere (Ros-Giralt et al. 2019, bottleneck structures), so that a round settles many links instead of one.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from lab.compiled import allocating, compiled

Floats = NDArray[np.float64]
Indices = NDArray[np.int32]
Counts = NDArray[np.int64]
_TIE = 1e-12
"""shares that differ by less, relatively, are equal"""


@allocating
def fair_rates(paths: Indices, capacity: Floats) -> Floats:
    """Rate of every flow, in bytes per second.

    `paths` (flows × hops) holds the links of each flow; shorter rows are padded with a link of infinite capacity.
    `capacity` is in bytes per second by link. A flow without a finite link is infinitely fast; one on a link of no
    capacity stands still. A round costs O(links + flows); there are at most as many as distinct shares.
    """
    num_flows, num_links = len(paths), len(capacity)
    rates, offers = np.zeros(num_flows), np.zeros(num_flows)
    left, share, least = capacity.copy(), np.zeros(num_links), np.zeros(num_links)
    counts, active = np.zeros(num_links, np.int64), np.arange(num_flows)
    used, num_used = np.zeros(min(num_links, paths.size), np.int64), 0
    for flow in range(num_flows):
        for link in paths[flow]:
            if not counts[link]:
                used[num_used] = link
                num_used += 1
            counts[link] += 1
    num_active = num_flows
    while num_active:
        for link in used[:num_used]:
            share[link] = left[link] / counts[link] if counts[link] else np.inf
            least[link] = np.inf
        _offer(paths, active[:num_active], share, offers, least)
        num_active = _settle(paths, active, num_active, share, least, offers, rates, left, counts)
    return rates


@compiled
def _offer(paths: Indices, active: Counts, share: Floats, offers: Floats, least: Floats) -> None:
    """What each flow is offered, the least share of its links; and the least offer that flows of each link have."""
    for flow in active:
        offer = np.inf
        for link in paths[flow]:
            offer = min(offer, share[link])
        offers[flow] = offer
        for link in paths[flow]:
            least[link] = min(least[link], offer)


@compiled
def _settle(
    paths: Indices, active: Counts, num_active: int, share: Floats, least: Floats,
    offers: Floats, rates: Floats, left: Floats, counts: Counts,
) -> int:  # fmt: skip
    """Gives the flows of every settled link their rate; the others stay in `active`, whose new length is returned."""
    kept = 0
    for k in range(num_active):
        flow = active[k]
        settled = np.isinf(offers[flow])
        for link in paths[flow]:
            settled |= not np.isinf(share[link]) and least[link] >= share[link] * (1 - _TIE)
        if not settled:
            active[kept] = flow
            kept += 1
            continue
        rates[flow] = offers[flow]
        for link in paths[flow]:
            counts[link] -= 1
            if not np.isinf(left[link]):
                left[link] = max(left[link] - rates[flow], 0.0)
    return kept
