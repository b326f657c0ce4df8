"""Compiling with numba, with a cache on disk that notices every edit.

numba keys a cached function by its own file only: an edit to another function that it calls would go unnoticed. The
cache folder is therefore named after a hash of numba's version and of all files that hold compiled functions.
Importing this module imports numba, which takes about half a second.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TypeVar

import numba
import platformdirs

Function = TypeVar("Function", bound=Callable[..., object])

FOLDERS = ("simulator", "profiles", "lab/policies")
"""where compiled functions stand, from the folder that holds the packages"""
MARK = "from lab.compiled import"


@cache
def cache_folder() -> Path:
    """Where compiled functions of exactly these sources are kept; `LAB_DATA_HOME` overrides the user's cache folder."""
    root, digest = Path(__file__).parent.parent, hashlib.sha256(numba.__version__.encode())
    for path in (Path(__file__), *sorted(path for folder in FOLDERS for path in (root / folder).glob("*.py"))):
        source = path.read_bytes()
        if MARK.encode() in source:
            digest.update(path.name.encode() + source)
    home = os.environ.get("LAB_DATA_HOME") or platformdirs.user_cache_dir("rlhf-lab")
    return Path(home) / "numba" / digest.hexdigest()[:16]


def cold() -> bool:
    """Whether nothing of these sources has been compiled on this machine yet."""
    return not cache_folder().exists()


def compiled(function: Function) -> Function:
    """The function, compiled at its first call and then kept on disk; its plain form stays at `.py_func`.

    It must not make arrays: it then counts no references, which halves the time of functions that pass many arrays on.
    """
    return _jit(function, _nrt=False)


def allocating(function: Function) -> Function:
    """The same for a function that makes arrays, or calls one that does."""
    return _jit(function)


def _jit(function: Function, **options: bool) -> Function:
    numba.config.CACHE_DIR = str(cache_folder())
    return numba.njit(cache=True, error_model="numpy", **options)(function)  # type: ignore[no-any-return]
