"""A real headless Chromium, and the real app on a free port."""

import os
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

CHROMIUM = "/usr/bin/chromium"
FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator:
    """One browser for all tests."""
    if not Path(CHROMIUM).exists():
        pytest.skip(f"{CHROMIUM} is not installed: apt-get install -y chromium")
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: make setup")
    with api.sync_playwright() as playwright:
        profile = tmp_path_factory.mktemp("chromium")
        context = playwright.chromium.launch_persistent_context(
            str(profile), executable_path=CHROMIUM, headless=True, args=FLAGS, viewport={"width": 1280, "height": 1000}
        )
        yield context
        context.close()


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working folder with the scenarios and two runs of the quickstart's, the second with other costs."""
    from lab.cli.simulate import predict, profiles_for, read
    from lab.runs import begin, finish
    from simulator.run import simulate

    work = tmp_path_factory.mktemp("work")
    (work / "scenarios").symlink_to(Path("scenarios").resolve())
    scenario = read(Path("scenarios/quickstart.yaml"), None)
    predict(scenario, work / "runs", None)
    finish(
        begin(work / "runs", scenario, "simulated"), scenario, simulate(scenario, profiles_for(scenario, "datasheet"))
    )
    return work


@pytest.fixture(scope="session")
def address(folder: Path) -> Iterator[str]:
    """Where the app answers."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "streamlit", "run", str(Path("app.py").resolve()), "--server.port", str(port)]
    options = ["--server.headless", "true", "--browser.gatherUsageStats", "false", "--server.address", "127.0.0.1"]
    options += ["--server.fileWatcherType", "none"]
    environment = os.environ | {"PYTHONPATH": str(Path.cwd())}
    process = subprocess.Popen([*command, *options], cwd=folder, env=environment, stdout=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        _await(url, process)
        yield url
    finally:
        process.terminate()
        process.wait(20)


def _await(url: str, process: subprocess.Popen, tries: int = 600) -> None:
    """Until the app answers; each refused connection takes a moment of its own."""
    for _ in range(tries):
        assert process.poll() is None, "the app ended"
        try:
            with urllib.request.urlopen(f"{url}/_stcore/health", timeout=5) as answer:
                if answer.status == 200:
                    return
        except OSError:
            process.poll() or os.sched_yield()
            _pause()
    raise AssertionError("the app does not answer")


def _pause() -> None:
    import select

    select.select([], [], [], 0.1)
