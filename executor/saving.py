"""A trainer's rank saves and restores: its part of a checkpoint, at once or beside the following steps."""

from __future__ import annotations

import copy
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from executor.checkpoint import Rank, write_whole
from executor.origin import origin
from executor.recorder import Recorder
from lab.data import tokenizer_folder
from lab.scenario import Scenario
from lab.tokenizing import tokenizer

if TYPE_CHECKING:
    from executor.learner import Learner
    from executor.shard import Shard

TOKENIZER = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja",
    "vocab.json", "vocab.txt", "merges.txt", "tokenizer.model",
)  # fmt: skip
"""files of a tokenizer in a model's folder"""
FAILED = "failed.txt"
"""in the staging folder of a rank whose write beside the run failed: why"""


class Saving:
    """The writes of one rank; at most one goes on beside the run."""

    def __init__(self, rank: Rank, recorder: Recorder) -> None:
        self.rank, self.recorder = rank, recorder
        self._writing: threading.Thread | None = None
        self._error: Exception | None = None

    def save(self, learner: Learner, folder: Path, about: dict[str, Any], blocking: bool) -> None:
        """Writes the rank's part into `folder` and seals it; where it does not block, only copies the state.

        Every rank has to call this, for sharded weights are gathered together. Waits for the write before. Raises
        OSError where that one or this one fails.
        """
        if self._writing is not None and self._writing.is_alive():
            with self.recorder.op("write_wait"):
                self.settle()
        self.settle()
        if blocking:
            with self.recorder.op("write") as notes:
                notes |= _quantities(_write(folder, self.rank, shard_of(learner, self.rank), about))
            return
        with self.recorder.op("snapshot") as notes:
            shard = shard_of(learner, self.rank).copied()
            notes |= _quantities(shard.num_bytes)
        arguments = (folder, shard, about | {"op": self.recorder.num_ops})
        self._writing = threading.Thread(target=self._beside, args=arguments, name="checkpoint")
        self._writing.start()

    def settle(self) -> None:
        """Waits for the write that goes on beside the run. Raises what made it fail."""
        if self._writing is not None:
            self._writing.join()
            self._writing = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def _beside(self, folder: Path, shard: Shard, about: dict[str, Any]) -> None:
        try:
            _write(folder, self.rank, shard, about)
        except Exception as error:  # raised in the trainer's own thread by `settle`, and told to the driver
            self._error = error
            _tell(folder / self.rank.name / FAILED, str(error))


def _write(folder: Path, rank: Rank, shard: Shard, about: dict[str, Any]) -> float:
    from executor.shard import write

    try:
        return write(folder, rank, shard, about | {"start_s": time.monotonic()})
    except Exception:  # what is half written helps nobody, and a full disk needs the room
        shutil.rmtree(folder / rank.name, ignore_errors=True)
        raise


def _tell(path: Path, problem: str) -> None:
    """As well as a full disk allows; the next call of the rank raises the error in any case."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, problem.encode())
    except OSError:
        return


def _quantities(size: float) -> dict[str, Any]:
    return {"bytes": size, "quantities": {"calls": 1.0, "bytes": size}}


def shard_of(learner: Learner, rank: Rank) -> Shard:
    """What a rank has to save. Every rank has to call this."""
    from executor.shard import Shard

    weights, (tensors, numbers) = learner.weights(), learner.state()
    first = rank.rank == 0
    return Shard(
        weights=weights if first else None, tensors=tensors, numbers=numbers,
        describe=_describer(learner.network, *_reader(learner.scenario, rank.role)) if first else None,
    )  # fmt: skip


def restore(learner: Learner, folder: Path, rank: Rank) -> float:
    """Brings a rank to the state that a complete checkpoint holds; its bytes. Every rank has to call this.

    Raises Damaged where the rank's files are not what was written.
    """
    from executor.checkpoint import verify_part
    from executor.shard import read

    size = verify_part(folder, rank)
    shard = read(folder, rank)
    assert shard.weights is not None, "a complete checkpoint has the weights"
    learner.restore(shard.weights, shard.tensors, shard.numbers)
    return size


def _reader(scenario: Scenario, role: str) -> tuple[Path | None, int | None]:
    """The folder of the tokenizer that reads the data, None for the built-in characters; and how its sequences end, where
    a network that is drawn from a seed cannot know."""
    folder = tokenizer_folder(scenario) if scenario.data.source is not None else None
    if folder is None:
        return None, None
    return Path(folder), tokenizer(folder).end if origin(scenario, role).weights == "random" else None


def _describer(network: Any, reader: Path | None = None, end: int | None = None) -> Callable[[Path], None]:
    """Writes the configuration of a network and the tokenizer, as Hugging Face lays them out.

    `reader`: folder of another tokenizer than the built-in one; `end`: the id that ends its sequences.
    """

    def describe(folder: Path) -> None:
        from executor.tokenizer import save_tokenizer

        config = getattr(network, "config", None) or network.trunk.config
        if end is not None:
            config = copy.deepcopy(config)
            config.eos_token_id = end
        config.save_pretrained(folder)
        if reader is None:
            save_tokenizer(folder)
            return
        for name in TOKENIZER:
            if (reader / name).is_file():
                shutil.copyfile(reader / name, folder / name)

    return describe
