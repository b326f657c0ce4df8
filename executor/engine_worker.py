"""The process of one rank of an engine: vLLM's own worker on a CPU, which knows how weights come and how seeds draw.

vLLM starts it by name, in its own process where an engine has several ranks.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.worker.cpu_worker import CPUWorker

from executor.engine import SeededGenerator, register


class EngineWorker(CPUWorker):
    """Registers what has to be known in this process before vLLM builds the network."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        register()
        torch.Generator = SeededGenerator  # type: ignore[misc]
        super().__init__(*args, **kwargs)

    def unpacking_seconds(self) -> float:
        """That this rank has spent so far on making whole weights of what came."""
        transfer: Any = self.weight_transfer_engine
        return 0.0 if transfer.group is None else float(transfer.group.unpacker.seconds)
