"""Runs as measurements: only measured ones, and every op that says what it did."""

from pathlib import Path

import msgspec
import pytest

from lab import runs
from lab.errors import InputError
from lab.load import load
from lab.timeline import Span, Timeline
from profiles.profile import find
from profiles.readers.runs import read
from simulator.run import simulate

SCENARIO = load("scenarios/quickstart.yaml").replace({"num_steps": 2})


@pytest.fixture(scope="module")
def timeline() -> Timeline:
    return simulate(SCENARIO, {"cpu-core": find("cpu-core", "datasheet")})


def written(folder: Path, timeline: Timeline, origin: str, spans: list[Span]) -> Path:
    header = msgspec.structs.replace(timeline.header, origin=origin)
    run = runs.begin(folder, SCENARIO, origin)
    runs.finish(run, SCENARIO, Timeline(header=header, spans=spans))
    return run


def test_a_simulated_run_is_no_measurement(tmp_path: Path, timeline: Timeline) -> None:
    with pytest.raises(InputError, match="the run is simulated"):
        read(written(tmp_path, timeline, "simulated", list(timeline.spans)))


def test_a_measured_run_yields_what_its_spans_say_and_one_that_says_nothing_is_refused(
    tmp_path: Path, timeline: Timeline
) -> None:
    quantities = {"quantities": {"passes": 1.0, "tokens": 64.0}}
    told = [
        msgspec.structs.replace(span, attrs=span.attrs | quantities) if span.stage == "reference" and span.op else span
        for span in timeline.spans
    ]
    found = read(written(tmp_path / "told", timeline, "measured", told))
    passes = [span for span in told if span.stage == "reference" and span.op == "forward"]
    assert [(point.op, point.device, point.model) for point in found] == [("logprob", "cpu-core", "tiny-llama")] * len(
        passes
    )
    assert sum(point.seconds for point in found) == pytest.approx(sum(span.seconds for span in passes), rel=1e-6)
    silent = [msgspec.structs.replace(span, attrs={}) for span in timeline.spans]
    with pytest.raises(InputError, match="says what it did"):
        read(written(tmp_path / "silent", timeline, "measured", silent))
