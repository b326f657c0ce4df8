"""A worker that is gone: what the run says of it, and what its peers and its successor do."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from lab.faults import Fault
from lab.timeline import Span

if TYPE_CHECKING:
    from torch import Tensor

Info = dict[str, Any]


@dataclass(eq=False, kw_only=True)
class Loss:
    """A worker that is gone, until another process stands in its place."""

    name: str
    fault: Fault
    at: float
    """on the monotonic clock of this machine: when it was struck, or was last heard"""
    record: dict[str, Any]
    """what the header says of it"""
    up: asyncio.Event = field(default_factory=asyncio.Event)
    """it works again"""


class GoneBack(Exception):
    """Trained state is gone: the run goes back to its last checkpoint."""

    def __init__(self, loss: Loss) -> None:
        super().__init__(f"{loss.name} was lost")
        self.loss = loss


def innermost(error: BaseException) -> BaseException:
    """The first cause of a group, and what a worker's error says of it."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    cause = getattr(error, "cause", None)
    return cause if isinstance(cause, BaseException) else error


def dead(error: BaseException, names: Mapping[str, str]) -> str | None:
    """The worker whose process is gone, where an error says so. `names`: of workers by actor id."""
    return names.get(str(getattr(innermost(error), "actor_id", None)))


def enter(worker: Any, version: int, published: Any) -> None:
    """Runs in a new engine's process: it starts with weights that were published before."""
    worker.load(published)
    worker.policy_version = version


def enter_again(worker: Any, version: int, published: Any) -> None:
    """The same, where the weights have changed since it began."""
    worker.release()
    enter(worker, version, published)


def weights_of(worker: Any) -> Any:
    """Runs in a trainer's process, on all ranks together: what it publishes, from the first."""
    found = worker.learner.weights()
    return Weights({name: tensor.cpu() for name, tensor in found.items()}) if worker.rank == 0 else None


class Weights(dict[str, Any]):
    """Tensors by name. Ray takes their bytes as they lie; of tensors as such it makes several copies on the way, which
    leaves a trainer's memory in pieces."""

    def __reduce__(self) -> tuple[Callable[..., dict[str, Any]], tuple[Any, ...]]:
        return _tensors, ({name: _bytes(tensor) for name, tensor in self.items()},)


def _bytes(tensor: Tensor) -> tuple[Any, str, tuple[int, ...]]:
    import torch

    plain = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy()
    return plain, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)


def _tensors(parts: Mapping[str, tuple[Any, str, tuple[int, ...]]]) -> dict[str, Any]:
    """Their own, so that they can be written to."""
    import torch

    def tensor(plain: Any, kind: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        return torch.from_numpy(plain.copy()).view(kind).view(shape) if plain.size else torch.empty(shape, dtype=kind)

    return {name: tensor(plain, getattr(torch, kind), shape) for name, (plain, kind, shape) in parts.items()}


def record_of(kind: str, target: str, at_s: float, way_back: str | None) -> dict[str, Any]:
    """What the header says of a fault, as the simulator's; what it cost is added."""
    return {"at_s": at_s, "kind": kind, "target": target, "recovery": way_back, "lost_s": 0.0, "lost_tokens": 0}


def once(info: Info) -> Info:
    """Of stages that a worker has begun more than once, all but the last are lost."""
    spans: Sequence[Span] = info["spans"]
    begun, ended = Counter(span.span_id for span in spans if not span.op), Counter[str]()
    found = []
    for span in spans:
        whole = span.span_id.partition("#")[0]
        again = ended[whole] + 1 < begun[whole]
        found.append(msgspec.structs.replace(span, attrs=span.attrs | {"lost": True}) if again else span)
        ended[whole] += not span.op
    return info | {"spans": found}
