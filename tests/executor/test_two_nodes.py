"""A run on a Ray that is there already, with two nodes: both on this machine, by two addresses of its loopback."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from executor.nodes import free_port
from lab.dataflow import conforms
from lab.load import load
from lab.timeline import read_parquet
from lab.wiring import build

pytestmark = [pytest.mark.real, pytest.mark.full]
SCENARIO = Path("scenarios/two-nodes-tiny.yaml")
HEAD, OTHER = "127.0.0.1", "127.0.0.2"
OPEN = {"RAY_AUTH_MODE": "disabled"}
"""whatever token the user of this machine has"""


def ray_start(*arguments: str) -> None:
    command = [Path(sys.executable).with_name("ray"), "start", "--num-cpus=1", "--disable-usage-stats", *arguments]
    said = subprocess.run(command, env=os.environ | OPEN, capture_output=True, text=True, timeout=120)
    assert said.returncode == 0, said.stdout + said.stderr


def raylets(folder: Path) -> list[psutil.Process]:
    """All processes of the Rays that have their files in a folder."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        if any(str(folder) in part for part in process.info["cmdline"] or ()):
            found.append(process)
    return found


@pytest.fixture(scope="module")
def two_nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = Path("/tmp") / f"lab-two-{os.getpid()}"  # short: paths of sockets end at 107 bytes
    address = f"{HEAD}:{free_port()}"
    port = address.split(":")[1]
    head = ("--head", f"--port={port}", f"--node-ip-address={HEAD}", "--include-dashboard=false")
    try:
        ray_start(*head, f"--temp-dir={folder}", "--labels=lab.node=train")
        ray_start(f"--address={address}", f"--node-ip-address={OTHER}", "--labels=lab.node=serve")
        yield address
    finally:
        for process in raylets(folder):
            process.send_signal(signal.SIGKILL)
        subprocess.run(["rm", "-rf", str(folder)], check=False)


def lab(address: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | OPEN | {"RAY_ADDRESS": address}
    command = [Path(sys.executable).with_name("lab"), "execute", "--no-metrics", "--no-tracking", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)


def test_a_run_on_two_nodes(two_nodes: str, tmp_path: Path) -> None:
    said = lab(two_nodes, str(SCENARIO), "--out", str(tmp_path), "--json")
    assert said.returncode == 0, said.stdout + said.stderr
    folder = Path(json.loads(said.stdout)["run_dir"])
    timeline = read_parquet(folder / "spans.parquet")
    assert conforms(build(load(SCENARIO)), timeline) == []
    nodes = timeline.header.host["nodes"]
    assert nodes.pop("actor.generate[0]") == OTHER
    assert set(nodes) == {"reference.score[0]", "reward.score[0]", "actor.train[0]"}
    assert len(set(nodes.values())) == 1 and OTHER not in nodes.values()
    assert timeline.header.clock_residual_s == 0.0  # one machine has one clock
    assert all(row["logprob_gap"] < 1e-3 for row in timeline.header.learning)
    [ratio] = {0 < span.attrs["ratio"] < 0.6 for span in timeline.stages() if span.stage == "transfer"}
    assert ratio


def test_a_label_that_nobody_has_is_bad_input(two_nodes: str, tmp_path: Path) -> None:
    other = tmp_path / "other.yaml"
    other.write_text(SCENARIO.read_text().replace("name: serve,", "name: server,").replace('"serve[0]"', '"server[0]"'))
    said = lab(two_nodes, str(other), "--out", str(tmp_path))
    assert said.returncode == 2 and "Traceback" not in said.stderr
    assert "lab.node=server" in said.stderr.replace("\n", " ")
