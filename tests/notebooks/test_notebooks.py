"""Notebooks run from top to bottom, and are kept without their outputs."""

from pathlib import Path

import msgspec
import nbformat
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

from lab import runs
from lab.cli.simulate import predict, profiles_for, read
from lab.timeline import Timeline
from simulator.run import simulate

NOTEBOOKS = sorted(Path("notebooks").glob("*.ipynb"))


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of the quickstart. Three simulations on the datasheet's costs stand in for the measured ones here: the test is of
    the notebook, and real runs are measured in tests/executor."""
    root = tmp_path_factory.mktemp("runs")
    scenario = read(Path("scenarios/quickstart.yaml"), None)
    predict(scenario, root, None)
    played = simulate(scenario, profiles_for(scenario, "datasheet"))
    for number in range(3):
        learning = [{"step": k, "reward": k / 24 + number / 100} for k in range(24)]
        header = msgspec.structs.replace(played.header, origin="measured", learning=learning)
        runs.finish(runs.begin(root, scenario, "measured"), scenario, Timeline.of(header, played.spans))
    return root


def executed(path: Path, root: Path, monkeypatch: pytest.MonkeyPatch) -> nbformat.NotebookNode:
    monkeypatch.setenv("LAB_RUNS", str(root))
    monkeypatch.setenv("PYTHONPATH", str(Path.cwd()))
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(
        notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(path.parent)}}
    ).execute()
    return notebook


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_and_draws(path: Path, recorded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    notebook = executed(path, recorded, monkeypatch)
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert not [output for output in outputs if output.output_type == "error"]
    drawn = [output for output in outputs if "application/vnd.plotly.v1+json" in output.get("data", {})]
    assert len(drawn) == 2
    text = "".join(output.get("text", "") for output in outputs)
    assert "3 measured runs" in text
    assert "together" in text


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_without_runs_it_says_what_to_do(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CellExecutionError, match="make run"):
        executed(path, tmp_path, monkeypatch)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_outputs_are_stripped(path: Path) -> None:
    cells = [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
    assert cells
    assert all(not cell.outputs and cell.execution_count is None for cell in cells)
