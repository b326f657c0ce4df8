"""Run folders: one folder a run, complete or absent.

`run.json` (header, summary, scenario, cluster), `scenario.yaml`, `spans.parquet`, `trace.json` (opens in Perfetto) and
`report.html`. A run that is being executed has `run.json` with status `running` and `spans.jsonl`, one line per span
of the finished steps, so that a crash loses none of them.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import IO, Any

import msgspec

from lab import load
from lab.errors import InputError
from lab.scenario import Scenario
from lab.timeline import Header, Span, Timeline, header_of, read_parquet, write_parquet

TAIL_BYTES = 1 << 16
"""that are looked at together from the end of a file"""


def begin(root: Path, scenario: Scenario, origin: str) -> Path:
    """A new folder under `root` that says a run has begun. Raises InputError where none can be made."""
    stamp = f"{datetime.now():%Y%m%d-%H%M%S}"
    _make(root)
    for number in range(1000):
        folder = root / "-".join((scenario.name, origin, stamp, *([str(number)] if number else [])))
        try:
            folder.mkdir()
        except FileExistsError:
            continue
        except OSError as error:
            raise InputError(
                file=str(folder), problem=str(error.strerror), remedy="name a writable folder with --out"
            ) from None
        try:
            write_atomically(folder / "scenario.yaml", load.dump(scenario).encode())
            mark(folder, scenario, msgspec.structs.replace(header_of(scenario, origin), status="running"))
        except OSError as error:
            shutil.rmtree(folder, ignore_errors=True)
            problem, remedy = str(error.strerror or error), "make room there, or name another folder with --out"
            raise InputError(file=str(folder), problem=problem, remedy=remedy) from None
        return folder
    raise InputError(
        file=str(root), problem="there are a thousand runs of this second", remedy="name another folder with --out"
    )


def mark(folder: Path, scenario: Scenario, header: Header) -> None:
    """Says in `run.json` how far a run is."""
    write_atomically(folder / "run.json", _run_json(scenario, header, None, folder))


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Holds a run's folder: nobody else executes it meanwhile. Raises InputError where somebody does.

    The lock is the kernel's, so that it ends with the process, however that ends; the file names the process.
    """
    path = folder / "lock"
    if not (folder / "run.json").is_file():
        raise InputError(file=str(folder), problem="not a run", remedy="name a folder that `lab execute` wrote")
    with _opened(path) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not path.exists() or path.stat().st_ino != os.fstat(file.fileno()).st_ino:
                raise BlockingIOError  # it was somebody's, who has just let it go
        except BlockingIOError:
            file.seek(0)
            problem = f"process {file.read().strip() or '?'} is running it"
            raise InputError(file=str(folder), problem=problem, remedy="wait for it, or end it first") from None
        file.truncate(0)
        with suppress(OSError):  # on a full disk the lock holds all the same
            file.write(str(os.getpid()))
            file.flush()
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


@contextmanager
def gone_if_refused(folder: Path) -> Iterator[None]:
    """Deletes the folder of a new run that is refused before it has done anything."""
    try:
        yield
    except InputError:
        if not any(any(whole_lines(folder / name)) for name in ("spans.jsonl", "learning.jsonl")):
            shutil.rmtree(folder, ignore_errors=True)
        raise


def is_held(folder: Path) -> bool:
    """Whether a process executes the run in a folder."""
    try:
        with (folder / "lock").open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def holder(folder: Path) -> int:
    """The process that executes the run in a folder. Raises InputError where none does."""
    if not (folder / "run.json").is_file():
        raise InputError(file=str(folder), problem="not a run", remedy="name a folder that `lab execute` wrote")
    named = _named(folder / "lock") if is_held(folder) else None
    if named is None:
        problem = f"no process executes it; {_status(folder)}"
        raise InputError(file=str(folder), problem=problem, remedy="name a run that is being executed")
    return named


def _named(lock: Path) -> int | None:
    """The process that a lock names, if it has that file open: a number that somebody else has by now is not believed."""
    try:
        pid, mine = int(lock.read_text()), lock.stat()
        held = (os.stat(f"/proc/{pid}/fd/{name}") for name in os.listdir(f"/proc/{pid}/fd"))
        return pid if any(_same(file, mine) for file in held) else None
    except (OSError, ValueError):
        return None


def _same(one: os.stat_result, other: os.stat_result) -> bool:
    return (one.st_dev, one.st_ino) == (other.st_dev, other.st_ino)


def _status(folder: Path) -> str:
    """Of a run that nobody executes."""
    try:
        status = _header(folder).status
    except (OSError, ValueError, KeyError, TypeError, msgspec.MsgspecError):
        return "and its run.json cannot be read"
    return "it was interrupted" if status == "running" else f"it is {status}"


def _opened(path: Path) -> IO[str]:
    try:
        return path.open("a+")
    except OSError as error:
        problem, remedy = str(error.strerror or error), "make the folder writable"
        raise InputError(file=str(path), problem=problem, remedy=remedy) from None


def _make(root: Path) -> None:
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        problem = f"no folder can be made here: {error.strerror}"
        raise InputError(file=str(root), problem=problem, remedy="name a writable folder with --out") from None


def finish(folder: Path, scenario: Scenario, timeline: Timeline) -> dict[str, Any]:
    """Writes everything of a run into its folder, `run.json` last; the summary as written."""
    from lab import reward_report
    from lab.metrics import summarise
    from lab.report import write_run_report
    from lab.trace import to_chrome

    summary: dict[str, Any] = summarise(timeline) | {"run_dir": str(folder)} | reward_report.summary(folder)
    write_parquet_atomically(timeline, folder / "spans.parquet")
    write_atomically(folder / "trace.json", to_chrome({timeline.header.origin: timeline}))
    write_run_report(timeline, summary, folder / "report.html")
    write_atomically(folder / "run.json", _run_json(scenario, timeline.header, summary, folder))
    return summary


def _run_json(scenario: Scenario, header: Header, summary: dict[str, Any] | None, folder: Path) -> bytes:
    return json.dumps(
        {
            "header": msgspec.to_builtins(header),
            "summary": summary,
            "scenario": scenario.model_dump(mode="json", by_alias=True),
            "cluster": scenario.hardware.model_dump(mode="json", by_alias=True),
        },
        indent=1,
        ensure_ascii=False,
    ).encode()


def read(folder: Path) -> Timeline:
    """The timeline of a run, also of one that was killed. Raises InputError where the folder is no run."""
    try:
        whole = folder / "spans.parquet"
        header = _header(folder) if (folder / "run.json").exists() or not whole.exists() else None
        if whole.exists() and (header is None or header.status != "running"):
            return read_parquet(whole)
        assert header is not None, "a folder without spans has run.json, or reading it has failed"
        if header.status == "done":
            raise ValueError("it is done, but its spans are missing")
        status = "interrupted" if header.status == "running" else header.status
        rows = [*finished_rows(folder).values()] or header.learning
        return Timeline.of(msgspec.structs.replace(header, status=status, learning=rows), finished_spans(folder))
    except (OSError, ValueError, KeyError, TypeError, msgspec.MsgspecError) as error:
        remedy = "name a folder that `lab simulate` or `lab execute` wrote"
        raise InputError(file=str(folder), problem=f"not a run: {error}", remedy=remedy) from None


def _header(folder: Path) -> Header:
    return msgspec.convert(json.loads((folder / "run.json").read_bytes())["header"], Header)


def finished_rows(folder: Path) -> dict[int, dict[str, Any]]:
    """By step, what an unfinished run has learned in the steps that it completed."""
    return {row["step"]: row for row in written_rows(folder)}


def written_rows(folder: Path) -> Iterator[dict[str, Any]]:
    """What an unfinished run has learned, one row after the other; a later one of a step counts instead of earlier ones."""
    return _decoded(folder / "learning.jsonl", _row)


def _row(line: bytes) -> dict[str, Any]:
    found = json.loads(line)
    if not isinstance(found, dict) or not isinstance(found.get("step"), int):
        raise ValueError("it tells of no step")
    return found


def _decoded(path: Path, decode: Callable[[bytes], Any]) -> Iterator[Any]:
    """What whole lines of a file say. Raises ValueError with the place of one that cannot be read."""
    for number, line in enumerate(whole_lines(path), start=1):
        try:
            yield decode(line)
        except (ValueError, msgspec.MsgspecError) as error:
            raise ValueError(f"line {number} of {path.name} is damaged: {error}") from None


def whole_lines(path: Path) -> Iterator[bytes]:
    """Whole lines of a file that a process may have died while appending to; none where there is no file."""
    if path.exists():
        with path.open("rb") as file:  # one at a time, for a long run has many
            yield from (line for line in file if line.endswith(b"\n"))


def mend(path: Path) -> None:
    """Cuts off the line that a process died while appending, so that the next one begins anew. Raises OSError."""
    if not path.exists():
        return
    with path.open("rb") as file:
        whole = size = file.seek(0, os.SEEK_END)
        while whole:
            start = max(whole - TAIL_BYTES, 0)
            file.seek(start)
            if (newline := file.read(whole - start).rfind(b"\n")) >= 0:
                whole = start + newline + 1
                break
            whole = start
    if whole < size:
        os.truncate(path, whole)


def finished_spans(folder: Path) -> Iterable[Span]:
    """Spans of the steps that an unfinished run completed; a half-written last line is left out."""
    return _decoded(folder / "spans.jsonl", partial(msgspec.json.decode, type=Span))


def read_scenario(folder: Path) -> Scenario:
    """The scenario of a run on the hardware it was for."""
    scenario = load.load(folder / "scenario.yaml")
    return scenario.replace({"cluster": json.loads((folder / "run.json").read_bytes())["cluster"]})


def list_runs(root: Path) -> list[Path]:
    """Run folders under `root`, newest first."""
    found = [path.parent for path in root.glob("*/run.json")]
    return sorted(found, key=lambda folder: (folder / "run.json").stat().st_mtime, reverse=True)


def write_parquet_atomically(timeline: Timeline, path: Path) -> None:
    part = path.with_suffix(".part")
    write_parquet(timeline, part)
    os.replace(part, path)


def write_atomically(path: Path, content: bytes) -> None:
    """Replaces a file's content in one step: a reader or a crash sees the old one or the new one. Raises OSError."""
    with replacing(path) as part:
        part.write(content)


@contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """A file whose content stands for that of `path` at the end, in one step; not where an error is raised meanwhile."""
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}", delete=False) as part:
        try:
            yield part
            part.flush()
            os.chmod(part.name, 0o644)
            os.replace(part.name, path)
        except BaseException:
            with suppress(OSError):
                os.unlink(part.name)
            raise


def comparison_folder(root: Path, name: str) -> Path:
    """A new folder for a comparison under `root`. Raises InputError where none can be made."""
    try:
        root.mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix=f"{name}-compared-{datetime.now():%Y%m%d-%H%M%S}-", dir=root))
    except OSError as error:
        raise InputError(
            file=str(root), problem=str(error.strerror), remedy="name a writable folder with --out"
        ) from None
