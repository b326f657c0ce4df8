"""Collectives: closed forms of the time that n ranks need, over links inside machines and between them.

With n ranks, S bytes, a link of bandwidth B (bytes/s, one direction) and latency L (s):

    ring       reduce_scatter = all_gather = (n-1)·L + (n-1)/n·S/B;  all_reduce is both one after the other
               broadcast: a chain of pieces, whose best size gives (√((n-2)·L) + √(S/B))²
    tree       all_reduce = 2·⌈log₂ n⌉·L + 2·S/B (two trees that reduce and broadcast, each with half of the data)
               broadcast = ⌈log₂ n⌉·L + S/B (the same two trees)
               reduce_scatter, all_gather = ⌈log₂ n⌉·L + (n-1)/n·S/B (recursive halving, doubling)
    direct     all_to_all: n-1 exchanges of S/n; p2p: L + S/B
    hierarchical  inside every machine, then between machines, then inside again, each by its ring

Sources: Thakur, Rabenseifner, Gropp 2005 (ring, recursive halving and doubling, pairwise exchange); Sanders, Speck,
Träff 2009 (two trees, as NCCL's double binary trees; best piece of a pipeline); Cho et al. 2019, BlueConnect
(hierarchical). The machine's port carries what all its ranks send to other machines.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple


class Wire(NamedTuple):
    """A link, one direction: bytes per second and seconds. Inside a machine of each device, outside of a machine."""

    bandwidth: float
    latency: float


@dataclass(frozen=True, kw_only=True)
class Group:
    """Who takes part. Raises ValueError for a group without ranks."""

    ranks: int
    per_machine: int
    """ranks on one machine, equal on all of them; `ranks` where one machine holds them all"""
    intra: Wire
    inter: Wire

    def __post_init__(self) -> None:
        if not 1 <= self.per_machine <= self.ranks:
            raise ValueError(f"{self.per_machine} ranks on each machine, of {self.ranks} ranks in all")

    @property
    def machines(self) -> int:
        return -(-self.ranks // self.per_machine)

    @property
    def even(self) -> bool:
        """Whether every machine holds equally many of the ranks, so that work can be staged."""
        return self.ranks % self.per_machine == 0

    @property
    def slowest(self) -> Wire:
        """What paces a ring through all ranks: it crosses each machine's port once in each direction."""
        if self.machines == 1:
            return self.intra
        return Wire(min(self.intra.bandwidth, self.inter.bandwidth), max(self.intra.latency, self.inter.latency))

    def inside(self) -> Group:
        """The ranks of one machine."""
        return Group(ranks=self.per_machine, per_machine=self.per_machine, intra=self.intra, inter=self.inter)

    def between(self, sharing: int = 1) -> Group:
        """One rank of each machine, where `sharing` such groups use the machine's port at once."""
        shared = Wire(self.inter.bandwidth / sharing, self.inter.latency)
        return Group(ranks=self.machines, per_machine=1, intra=self.intra, inter=shared)


Form = Callable[[float, Group], float]


def seconds(op: str, size: float, group: Group, algorithm: str | None = None) -> float:
    """Time of a collective of `size` bytes, by the named algorithm or else by the fastest.

    Size as in `lab.measurement.OPS`: of one rank's input (all_reduce, all_to_all, broadcast, p2p), of the whole
    result (all_gather), of the whole input (reduce_scatter). Raises ValueError for an op or algorithm there is not.
    """
    if group.ranks == 1 or size <= 0:
        return 0.0
    offered = times(op, size, group)
    if algorithm is None:
        return min(offered.values())
    if algorithm not in offered:
        raise ValueError(f"{op} over these ranks is not done by {algorithm!r}; it is by {', '.join(offered)}")
    return offered[algorithm]


def times(op: str, size: float, group: Group) -> dict[str, float]:
    """Time by algorithm, those left out that cannot serve the group."""
    if op not in ALGORITHMS:
        raise ValueError(f"there is no collective {op!r}; there are {', '.join(ALGORITHMS)}")
    staged = group.even and 1 < group.per_machine < group.ranks
    return {name: form(size, group) for name, form in ALGORITHMS[op].items() if staged or name != "hierarchical"}


def _ring_half(size: float, group: Group) -> float:
    n, wire = group.ranks, group.slowest
    return (n - 1) * wire.latency + (n - 1) / n * size / wire.bandwidth


def _ring_all_reduce(size: float, group: Group) -> float:
    return 2 * _ring_half(size, group)


def _tree_half(size: float, group: Group) -> float:
    n, wire = group.ranks, group.slowest
    return _rounds(n) * wire.latency + (n - 1) / n * size / wire.bandwidth


def _tree_broadcast(size: float, group: Group) -> float:
    wire = group.slowest
    return _rounds(group.ranks) * wire.latency + size / wire.bandwidth


def _tree_all_reduce(size: float, group: Group) -> float:
    return 2 * _tree_broadcast(size, group)


def _chain(size: float, group: Group) -> float:
    """k pieces take (n - 2 + k)·(L + S/(k·B)); least at k = √((n-2)·S/(B·L)), but at least one piece."""
    hops, wire = group.ranks - 2, group.slowest
    whole = size / wire.bandwidth
    if hops * whole <= wire.latency:
        return (hops + 1) * (wire.latency + whole)
    return (math.sqrt(hops * wire.latency) + math.sqrt(whole)) ** 2


def _direct_all_to_all(size: float, group: Group) -> float:
    n, r = group.ranks, group.per_machine
    inside = (r - 1) / n * size / group.intra.bandwidth
    if group.machines == 1:
        return (n - 1) * group.intra.latency + inside
    return (n - 1) * group.slowest.latency + max(inside, r * (n - r) / n * size / group.inter.bandwidth)


def _p2p(size: float, group: Group) -> float:
    return group.slowest.latency + size / group.slowest.bandwidth


def _staged_half(size: float, group: Group) -> float:
    """A reduce_scatter: inside, then every rank its share with its likes on the other machines. An all_gather: back."""
    r = group.per_machine
    return _ring_half(size, group.inside()) + _ring_half(size / r, group.between(sharing=r))


def _staged_all_reduce(size: float, group: Group) -> float:
    r = group.per_machine
    outside = min(form(size / r, group.between(sharing=r)) for form in (_ring_all_reduce, _tree_all_reduce))
    return 2 * _ring_half(size, group.inside()) + outside


def _staged_broadcast(size: float, group: Group) -> float:
    """One rank of each machine gets it, and hands it on."""
    return min(form(size, group.between()) for form in (_chain, _tree_broadcast)) + _chain(size, group.inside())


def _staged_all_to_all(size: float, group: Group) -> float:
    """Ranks of a machine first swap so that each then talks to one rank of every other machine."""
    r = group.per_machine
    return _direct_all_to_all(size, group.inside()) + _direct_all_to_all(size, group.between(sharing=r))


def _rounds(ranks: int) -> int:
    return math.ceil(math.log2(ranks))


ALGORITHMS: dict[str, dict[str, Form]] = {
    "all_reduce": {"ring": _ring_all_reduce, "tree": _tree_all_reduce, "hierarchical": _staged_all_reduce},
    "reduce_scatter": {"ring": _ring_half, "tree": _tree_half, "hierarchical": _staged_half},
    "all_gather": {"ring": _ring_half, "tree": _tree_half, "hierarchical": _staged_half},
    "broadcast": {"ring": _chain, "tree": _tree_broadcast, "hierarchical": _staged_broadcast},
    "all_to_all": {"direct": _direct_all_to_all, "hierarchical": _staged_all_to_all},
    "p2p": {"direct": _p2p},
}
"""by collective: its algorithms"""
