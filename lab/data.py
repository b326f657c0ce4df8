"""Where prompts, demonstrations, preferences and labels come from: a built-in task, or a file of JSON Lines."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, ValidationError, model_validator

from lab.algorithm import LEARNING
from lab.errors import InputError, WrongValue
from lab.records import Record
from lab.rows import FIELDS, Row, Rows, Source
from lab.tokenizing import FILE, tokenizer

if TYPE_CHECKING:
    from lab.scenario import Scenario

NEEDED: dict[str, Source] = {
    "ppo": "prompts", "grpo": "prompts", "sft": "demonstrations", "reward_model": "preferences", "dpo": "preferences",
    "kto": "labels",
}  # fmt: skip
"""what a file must hold, by algorithm; dpo that generates its pairs needs prompts"""
_LENGTHS = ("prompt_tokens", "response_tokens")


class Data(Record):
    """Where prompts come from, and what offline algorithms learn from: one task, or one file.

    A file is read when the scenario is, and `sha256` says what it held; lengths of the workload are then those of its
    rows, so none are written for them. Paths are relative to the scenario. See `lab.rows` for the fields of a line.
    """

    task: Literal["echo"] | None = Field(
        default="echo",
        description="a built-in task, which supplies prompts, demonstrations, pairs and labels; null where a file does",
        json_schema_extra=LEARNING,
    )
    prompts: str | None = Field(default=None, description="file for ppo, grpo, online dpo", json_schema_extra=LEARNING)
    demonstrations: str | None = Field(default=None, description="file for sft", json_schema_extra=LEARNING)
    preferences: str | None = Field(
        default=None, description="file for reward_model and dpo", json_schema_extra=LEARNING
    )
    labels: str | None = Field(default=None, description="file for kto", json_schema_extra=LEARNING)
    on_broken: Literal["refuse", "skip"] = Field(
        default="refuse", description="what a broken line of the file does", json_schema_extra=LEARNING
    )
    max_tokens: int | None = Field(
        default=None,
        ge=2,
        description="lines with a longer prompt and response are broken; null: what the model can read",
        json_schema_extra=LEARNING,
    )
    held_out_share: float = Field(
        default=0.1, ge=0, le=0.5, description="of the file's rows: for evaluations only", json_schema_extra=LEARNING
    )
    sha256: str | None = Field(
        default=None, description="of the file, written where it is read", json_schema_extra=LEARNING
    )
    skipped: int = Field(
        default=0, ge=0, description="broken lines, written where the file is read", json_schema_extra=LEARNING
    )

    @model_validator(mode="before")
    @classmethod
    def _no_task(cls, said: Any) -> Any:
        """Where a file is named, no task need be ruled out."""
        named = isinstance(said, dict) and any(said.get(name) is not None for name in FIELDS)
        return {"task": None} | said if named else said

    @model_validator(mode="after")
    def _one_source(self) -> Data:
        named = [name for name in FIELDS if getattr(self, name) is not None]
        if len(named) > 1:
            problem = f"{' and '.join(named)} are named, a run reads one file"
            raise WrongValue(path=(named[1],), problem=problem, remedy="remove one")
        if named and self.task is not None:
            problem = f"the data are the task {self.task} and a file of {named[0]}"
            raise WrongValue(path=("task",), problem=problem, remedy="remove one of the two")
        if not named and self.task is None:
            remedy = f"name a task, or a file as {', '.join(f'`{name}: FILE.jsonl`' for name in FIELDS)}"
            raise WrongValue(path=("task",), problem="there are no data", remedy=remedy)
        return self

    @property
    def source(self) -> Source | None:
        """What the file holds; None: a task supplies everything."""
        return next((name for name in FIELDS if getattr(self, name) is not None), None)

    @property
    def file(self) -> Path:
        """Raises ValueError where there is none."""
        if self.source is None:
            raise ValueError("the data are a task's")
        return Path(getattr(self, self.source))

    def about(self) -> dict[str, Any]:
        """What a run's header says of the file; nothing of a task."""
        if self.source is None:
            return {}
        return {"source": self.source, "file": self.file.name, "sha256": self.sha256, "skipped": self.skipped}

    def known(self) -> dict[str, Any]:
        """What counts for the scenario's digest: of a file its content, and not where it lies."""
        said = self.model_dump(mode="json")
        return said if self.source is None else said | {self.source: self.sha256}


def read_rows(data: Data, folder: str | None, longest: int | None = None) -> Rows:
    """The rows of the file. Raises InputError as `lab.rows.read`, and where it is not what the scenario was read with.

    Args:
        folder: of the tokenizer; None: the built-in characters.
        longest: tokens of the longest sequence taken where the scenario says nothing.
    """
    from lab.rows import read

    assert data.source is not None, "a task has no rows"
    limit, reader = data.max_tokens or longest, tokenizer(folder)
    try:
        found = read(data.file, data.source, reader, max_tokens=limit, skip=data.on_broken == "skip")
    except InputError as error:
        error.key = error.key or f"data.{data.source}"
        raise
    if data.sha256 not in (None, found.sha256):
        problem = "the file is not the one that the scenario was read with"
        raise InputError(
            file=str(data.file), key="data.sha256", problem=problem, remedy="use that file, or the scenario as written"
        )
    return found


def tokenizer_folder(scenario: Scenario) -> str | None:
    """The folder of the tokenizer that reads the data: that of the first model in use; None: the built-in characters."""
    models = scenario.models.model_dump(mode="json")
    return _folder(models)


def _folder(models: dict[str, Any]) -> str | None:
    for role in ("actor", "reward", "reference"):
        model = models.get(role)
        if not isinstance(model, dict):
            continue
        if model.get("tokenizer"):
            return str(model["tokenizer"])
        weights = str(model.get("weights", "random"))
        if weights != "random" and (Path(weights) / FILE).is_file():
            return weights
    return None


def with_folders(said: dict[str, Any], folder: Path) -> dict[str, Any]:
    """A scenario as written, with the folders of weights and tokenizers that lie beside it found there."""
    models = said.get("models")
    if not isinstance(models, dict):
        return said
    return said | {"models": {role: _placed(model, folder) for role, model in models.items()}}


def _placed(model: Any, folder: Path) -> Any:
    named = {key: model[key] for key in ("weights", "tokenizer") if isinstance(model, dict) and key in model}
    beside = {
        key: str((folder / name).absolute())
        for key, name in named.items()
        if isinstance(name, str) and not Path(name).exists() and (folder / name).is_dir()
    }
    return model | beside if beside else model


def with_file(said: dict[str, Any], folder: Path) -> dict[str, Any]:
    """A scenario as written, with the file of its `data` read: where it lies, what it holds, and the lengths of its rows.

    As it is where the data are a task's, or were read before. Raises InputError for what is wrong in the file.
    """
    data, workload, models = (said.get(name) for name in ("data", "workload", "models"))
    if not isinstance(data, dict) or not isinstance(workload, dict) or data.get("sha256") is not None:
        return said
    named = [name for name in FIELDS if isinstance(data.get(name), str)]
    if len(named) != 1:
        return said
    [name] = named
    algorithm = said.get("algorithm")
    if isinstance(algorithm, dict) and algorithm.get("name") in NEEDED:
        for key, problem, remedy in _unfit(name, algorithm["name"], algorithm.get("online") is True):
            raise InputError(key=key, problem=problem, remedy=remedy)
    try:
        checked = Data.model_validate(data | {name: str((folder / data[name]).absolute())})
    except ValidationError:
        return said  # told with its key where the whole scenario is checked
    found = read_rows(checked, _folder(models if isinstance(models, dict) else {}))
    parts = found.split(checked.held_out_share, int(said.get("seed") or 0))
    written = checked.model_dump(mode="json", exclude_unset=True) | {"sha256": found.sha256}
    written |= {"skipped": len(found.skipped)} if found.skipped else {}
    return said | {"data": written, "workload": _with_lengths(workload, parts, checked.file.name)}


def _with_lengths(workload: dict[str, Any], parts: tuple[list[Row], list[Row]], name: str) -> dict[str, Any]:
    """A workload with the lengths of the rows to train on and of those held out."""
    lengths = {"prompt_tokens": [[len(row.prompt) for row in rows] for rows in parts]}
    if parts[0][0].responses:
        lengths["response_tokens"] = [[len(one) for row in rows for one in row.responses] for rows in parts]
    for key in lengths:
        if key in workload:
            problem = f"lengths are those of {name}"
            raise InputError(key=f"workload.{key}", problem=problem, remedy="remove it")
    listed = {key: {"dist": "listed", "values": kept, "held_out": apart} for key, (kept, apart) in lengths.items()}
    return workload | listed


def _unfit(source: Source, algorithm: str, rolls_out: bool) -> Iterator[tuple[str, str, str]]:
    needed: Source = "prompts" if rolls_out else NEEDED[algorithm]
    if source != needed:
        fits = [name for name, kind in NEEDED.items() if kind == source]
        problem = f"{algorithm} cannot learn from {source}, which are for {', '.join(fits)}"
        yield f"data.{source}", problem, f"name a file as `{needed}: FILE.jsonl`"


def contradictions(scenario: Scenario) -> Iterator[tuple[str, str, str]]:
    """Data that the algorithm cannot use: key, problem and remedy."""
    data, algorithm = scenario.data, scenario.algorithm
    if (source := data.source) is None:
        return
    yield from _unfit(source, algorithm.name, algorithm.rolls_out)
    if data.sha256 is None:
        yield f"data.{source}", "the file was not read", "read the scenario from a file"
    if data.held_out_share == 0 and scenario.evaluate.every_steps is not None:
        yield "data.held_out_share", "an evaluation needs rows that are not trained on", "set it to 0.1"
    each = 2 if source == "preferences" else 1
    if source != "prompts" and scenario.workload.samples_per_prompt != each:
        problem = f"a line of {source} has {each} response{'s' if each > 1 else ''}"
        yield "workload.samples_per_prompt", problem, f"set it to {each}"
    elif source != "prompts" and scenario.evaluate.every_steps and scenario.evaluate.samples_per_prompt != each:
        problem = f"a line of {source} has {each} response{'s' if each > 1 else ''}"
        yield "evaluate.samples_per_prompt", problem, f"set it to {each}"
