"""Reports: one self-contained page that says what the numbers say."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import pytest

from lab import devices, operators
from lab.compare import Comparison, Row, compare
from lab.devices import Reading, Readings
from lab.metrics import summarise
from lab.report import middle, verdict, write_comparison_report, write_run_report
from lab.timeline import Timeline
from tests.strategies import play, scenario


def played(rollout: float, origin: str) -> Timeline:
    """Four steps whose other stages take a second, dispatched at once."""
    return play(
        scenario(num_steps=4),
        lambda stage, step, worker: 0.0 if worker == "dispatch" else rollout if stage == "rollout" else 1.0,
        origin,
    )


PREDICTED, MEASURED = played(1.0, "simulated"), played(1.5, "measured")


def named(timeline: Timeline, name: str) -> Timeline:
    """The timeline with a name of the user's, wherever a header has room for one."""
    header = msgspec.structs.replace(
        timeline.header, scenario=name, error=name, host={"name": name}, software={name: name},
        profiles={name: {"name": name, "extrapolated_share": 0.5, "unmeasured": [name]}},
    )  # fmt: skip
    return msgspec.structs.replace(timeline, header=header)


class Page(HTMLParser):
    """The tags and the text of a page, scripts and styles left out."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))
        self.text = re.sub(r"\s+", " ", " ".join(self.words))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if self.cdata_elem is None:  # not in a script or style
            self.words.append(data)


def comparison_page(tmp_path: Path, *measured: Timeline, predicted: Timeline = PREDICTED) -> tuple[Page, Comparison]:
    found = compare(predicted, measured)
    write_comparison_report(found, predicted, measured, tmp_path / "report.html")
    return Page(tmp_path / "report.html"), found


def test_the_page_of_a_comparison_says_the_verdict_the_table_and_the_reasons(tmp_path: Path) -> None:
    page, found = comparison_page(tmp_path, MEASURED)
    assert "predicted to take 5.00 s and took 5.50 s : -9.1%" in page.text
    for stage in found.stages:
        assert f"{stage} " in page.text
    assert found.explains[0].text in page.text
    assert "rollout holds up the step 500 ms longer than predicted: 100% of the difference" in page.text
    assert PREDICTED.header.digest in page.text
    charts = [attrs["id"] for tag, attrs in page.tags if attrs.get("class") == "chart"]
    assert charts == [f"chart-{i + 1}" for i in range(len(charts))] and len(charts) >= 4


def test_three_repeats_are_told_by_their_spread(tmp_path: Path) -> None:
    page, _ = comparison_page(tmp_path, MEASURED, MEASURED, MEASURED)
    assert "3 measured repeats" in page.text and "spread of repeats" in page.text


def test_a_page_says_when_nothing_was_measured(tmp_path: Path) -> None:
    assert "nothing of it was measured" in comparison_page(tmp_path, PREDICTED)[0].text
    assert "nothing of it was measured" not in comparison_page(tmp_path, MEASURED)[0].text


def test_the_page_of_a_run_says_the_step_and_the_bottleneck(tmp_path: Path) -> None:
    summary = summarise(PREDICTED)
    write_run_report(PREDICTED, summary, tmp_path / "report.html")
    page = Page(tmp_path / "report.html")
    assert "A step takes 5.00 s" in page.text and summary["bottleneck"]["why"] in page.text
    assert "4 of 4 steps" in page.text


def test_a_page_needs_nothing_from_elsewhere(tmp_path: Path) -> None:
    page, _ = comparison_page(tmp_path, MEASURED)
    assert not [attrs for tag, attrs in page.tags if "src" in attrs or (tag == "link" and attrs["href"] != "data:,")]
    assert "Plotly.newPlot" in (tmp_path / "report.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "name", ["<script>alert(1)</script>", "</script><img src=x onerror=alert(1)>", '"><b>', "{{ 7 * 7 }}"]
)
def test_a_users_text_stays_text(name: str, tmp_path: Path) -> None:
    before, _ = comparison_page(tmp_path, MEASURED)
    plain = [tag for tag, _ in before.tags]
    page, _ = comparison_page(tmp_path, named(MEASURED, name), predicted=named(PREDICTED, name))
    assert name in page.text
    assert [tag for tag, _ in page.tags if tag not in ("br", "tr", "td", "code")] == [
        tag for tag in plain if tag not in ("br", "tr", "td", "code")
    ]
    write_run_report(named(PREDICTED, name), summarise(named(PREDICTED, name)), tmp_path / "run.html")
    assert name in Page(tmp_path / "run.html").text


def test_a_run_that_finished_nothing_has_a_page(tmp_path: Path) -> None:
    nothing = Timeline.of(msgspec.structs.replace(MEASURED.header, status="failed", error="out of memory"), [])
    write_run_report(nothing, summarise(nothing), tmp_path / "report.html")
    assert "out of memory" in Page(tmp_path / "report.html").text


def lossy(timeline: Timeline, origin: str, lost_s: float) -> Timeline:
    faults = [
        {"at_s": 2.0, "kind": "trainer_lost", "target": "actor.train[0]", "recovery": "restart_from_checkpoint",
         "lost_s": lost_s, "lost_tokens": 184, "lost_samples": 23, "steps": 2},
        {"at_s": 3.0, "kind": "straggler", "target": "<b>", "recovery": None},
    ]  # fmt: skip
    samples = {"issued": 1300, "trained": 1200, "lost": 23, "buffered": 77}
    host = {"memory_bytes": 16e9, "load_average": 5.7060546875}
    header = msgspec.structs.replace(
        timeline.header, origin=origin, faults=faults, lost_s=lost_s, samples=samples, host=host
    )
    return msgspec.structs.replace(timeline, header=header)


def test_the_page_of_a_run_tells_its_faults_and_what_became_of_its_samples(tmp_path: Path) -> None:
    timeline = lossy(MEASURED, "measured", 1.5)
    write_run_report(timeline, summarise(timeline), tmp_path / "report.html")
    text = Page(tmp_path / "report.html").text
    assert "2.00 s trainer_lost actor.train[0] restart from checkpoint 1.50 s 184 23 2" in text
    assert "3.00 s straggler <b> – – – – –" in text
    assert "Samples: 1,300 issued, 1,200 trained, 23 lost, 77 left in the buffer." in text
    assert "memory: 16.00 GB load average: 5.71" in text
    write_run_report(MEASURED, summarise(MEASURED), tmp_path / "report.html")
    calm = Page(tmp_path / "report.html").text
    assert "trainer_lost" not in calm and "Samples:" not in calm


def test_the_page_of_a_comparison_sets_what_faults_cost_beside_its_prediction(tmp_path: Path) -> None:
    measured = [lossy(MEASURED, "measured", seconds) for seconds in (1.0, 2.0)]
    page, _ = comparison_page(tmp_path, *measured, predicted=lossy(PREDICTED, "simulated", 1.25))
    assert "lost to faults, time 1.25 s 1.50 s" in page.text
    assert "faults 2 2" in page.text
    page, _ = comparison_page(tmp_path, MEASURED)
    assert "lost to faults" not in page.text and "versions between" not in page.text
    ends = [f"{summarise(timeline)['makespan_s']:.2f} s" for timeline in (PREDICTED, MEASURED)]
    assert f"the whole run {' '.join(ends)}" in page.text


def test_an_error_is_told_from_noise() -> None:
    def row(error: float | None, noise: float | None) -> Row:
        return Row(predicted=1.0, measured=1.0, error=error, noise=noise, noise_kind="")

    assert verdict(row(-0.04, 0.05)) == "within the noise"
    assert verdict(row(0.06, 0.05)) == "outside the noise"
    assert verdict(row(0.06, None)) == "noise unknown"
    assert verdict(row(None, 0.05)) == "only in one of the two"


def test_the_middle_step_is_one_that_both_finished() -> None:
    short = Timeline.of(MEASURED.header, [span for span in MEASURED.spans if span.step < 2])
    assert (middle([PREDICTED]), middle([PREDICTED, short])) == (2, 1)


def test_a_run_that_was_watched_shows_its_devices_and_where_the_time_of_its_stages_went(tmp_path: Path) -> None:
    readings = Readings()
    readings.add(0.0, [Reading(kind="device", name="core0", use=0.5)])
    readings.write(tmp_path / devices.FILE)
    (tmp_path / operators.FOLDER).mkdir()
    event = {"ph": "X", "cat": "cpu_op", "name": "aten::<mm>", "pid": 1, "tid": 1, "ts": 0, "dur": 2500}
    (tmp_path / operators.FOLDER / "update_actor-3-a.json.gz").write_bytes(json.dumps([event]).encode())
    write_run_report(MEASURED, summarise(MEASURED), tmp_path / "report.html")
    page = Page(tmp_path / "report.html")
    assert "Devices and processes" in page.text
    assert "update_actor on a aten::<mm> 1 2.5 ms 2.5 ms" in page.text
    (tmp_path / devices.FILE).unlink()
    (tmp_path / operators.FOLDER / "update_actor-3-a.json.gz").unlink()
    write_run_report(MEASURED, summarise(MEASURED), tmp_path / "report.html")
    page = Page(tmp_path / "report.html")
    assert "Devices and processes" not in page.text and "Operators" not in page.text
