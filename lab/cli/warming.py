"""Filling caches once, so that no first command waits for them: bytecode, the compiled engine, heavy imports."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

PROJECT = Path(__file__).resolve().parents[2]
CACHED_IMPORTS = """
import importlib, time
for name in {modules!r}:
    start = time.monotonic()
    importlib.import_module(name)
    print(f"imported {{name}} in {{time.monotonic() - start:.1f}} s", flush=True)
"""


def extension_folder() -> Path:
    """Where torch builds C++ extensions."""
    return Path(os.environ.get("TORCH_EXTENSIONS_DIR", Path.home() / ".cache" / "torch_extensions"))


def stale_locks() -> list[Path]:
    """Lock files of extension builds that nothing is building any more."""
    import psutil

    locks = sorted(extension_folder().glob("**/lock"))
    building = locks and any(process.info["name"] == "ninja" for process in psutil.process_iter(["name"]))
    return [] if building else locks


def compile_bytecode() -> None:
    """Writes .pyc files for this project even where PYTHONDONTWRITEBYTECODE stops imports from doing so."""
    import compileall

    for package in ("lab", "profiles", "simulator", "executor"):
        compileall.compile_dir(PROJECT / package, quiet=2)


def compile_engine(console: Console) -> None:
    """Compiles the simulator's rollout engine, which `lab simulate` would otherwise do at its first call."""
    from simulator import replay

    begun = time.monotonic()
    replay.warm_up()
    console.print(f"compiled the simulated engine in {time.monotonic() - begun:.1f} s")


def warm_imports(console: Console, modules: Sequence[str]) -> bool:
    """Imports the engine's parts once, in another process, to fill caches; True if it went well."""
    quiet = {"TORCHDYNAMO_DISABLE": "1", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"}
    answer = subprocess.run(
        [sys.executable, "-c", CACHED_IMPORTS.format(modules=list(modules))],
        env=os.environ | quiet,
        capture_output=True,
        text=True,
    )
    console.print(*(line for line in answer.stdout.splitlines() if line.startswith("imported ")), sep="\n")
    if answer.returncode:
        console.print(answer.stderr.strip(), style="red", markup=False, highlight=False)
    return answer.returncode == 0


def warm_up(console: Console, modules: Sequence[str]) -> bool:
    """Fills all caches and imports the modules in another process; True if that went well."""
    for lock in stale_locks():
        lock.unlink(missing_ok=True)
        console.print(f"removed {lock}, left by a killed build")
    compile_bytecode()
    compile_engine(console)
    return warm_imports(console, modules)
