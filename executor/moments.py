"""What an optimizer knows beside the weights, as plain tensors: for a checkpoint that holds no code.

Which tensors the optimizer steps depends on the ZeRO stage: the parameters themselves (0), or this rank's flat part of
them (1, 2 and 3).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

RNG = "torch_rng"


def masters(engine: Any, zero_stage: int) -> list[Tensor]:
    """The tensors that the optimizer of a DeepSpeed engine steps on this rank, in a fixed order."""
    if zero_stage == 3:
        return list(engine.optimizer.fp32_partitioned_groups_flat)
    if zero_stage:
        return list(engine.optimizer.single_partition_of_fp32_groups)
    return [parameter for group in engine.optimizer.param_groups for parameter in group["params"]]


def inner(engine: Any, zero_stage: int) -> torch.optim.Optimizer:
    """The optimizer of torch below DeepSpeed's."""
    found: torch.optim.Optimizer = engine.optimizer.optimizer if zero_stage else engine.optimizer
    return found


def taken(engine: Any, zero_stage: int) -> dict[str, Tensor]:
    """Copies of the moments and step counts of this rank, and of the state of torch's random generator."""
    state = inner(engine, zero_stage).state
    found = {
        f"optimizer.{number}.{name}": torch.as_tensor(value).detach().clone()
        for number, master in enumerate(masters(engine, zero_stage))
        for name, value in state.get(master, {}).items()
    }
    return found | {RNG: torch.get_rng_state()}


def put_back(engine: Any, zero_stage: int, tensors: dict[str, Tensor]) -> None:
    """The reverse of `taken`. Raises ValueError naming a tensor that is missing or has another shape."""
    if RNG not in tensors:
        raise ValueError(f"{RNG} is missing")
    state, found = inner(engine, zero_stage).state, masters(engine, zero_stage)
    by_master = _by_master(tensors, len(found))
    if len({frozenset(values) for values in by_master}) > 1:
        raise ValueError("some parts of the optimizer are missing")
    for number, (master, values) in enumerate(zip(found, by_master, strict=True)):
        for name, value in values.items():
            if value.dim() and value.shape != master.shape:
                shapes = f"{tuple(value.shape)}, not {tuple(master.shape)}"
                raise ValueError(
                    f"optimizer.{number}.{name} has the shape {shapes}: it is of another rank or number of ranks"
                )
        state[master] = {name: value.clone() for name, value in values.items()}
    torch.set_rng_state(tensors[RNG].clone())


def _by_master(tensors: dict[str, Tensor], number: int) -> list[dict[str, Tensor]]:
    found: list[dict[str, Tensor]] = [{} for _ in range(number)]
    for key, tensor in tensors.items():
        if key == RNG:
            continue
        _, index, name = key.split(".", 2)
        if int(index) >= number:
            raise ValueError(f"{key} belongs to no part of this optimizer, which has {number}")
        found[int(index)][name] = tensor
    return found
