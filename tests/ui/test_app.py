"""What a person sees in the browser."""

import os
from pathlib import Path

import pytest

SHOTS = os.environ.get("LAB_SCREENSHOTS")


@pytest.fixture
def page(browser):
    """A fresh tab that collects errors of its console."""
    tab = browser.new_page()
    tab.set_default_timeout(60_000)
    tab.errors = []
    tab.on("pageerror", lambda error: tab.errors.append(str(error)))
    tab.on("console", lambda line: tab.errors.append(line.text) if line.type == "error" else None)
    yield tab
    tab.close()


def settled(page) -> None:
    """Waits until the app has run to its end: what is typed or clicked before that may be drawn over."""
    page.locator('[data-test-script-state="notRunning"]').wait_for(state="attached")


def shot(page, name: str) -> None:
    if SHOTS:
        page.set_viewport_size({"width": 1280, "height": 2600})
        page.wait_for_timeout(500)
        page.screenshot(path=str(Path(SHOTS) / f"{name}.png"), full_page=True)


def test_a_scenario_is_simulated_and_its_gantt_accounts_and_summary_appear(page, address: str) -> None:
    page.goto(address)
    page.get_by_role("button", name="Simulate", exact=True).click()
    page.get_by_text("quickstart: predicted").wait_for()
    charts = page.locator(".js-plotly-plot")
    charts.nth(2).wait_for()
    assert charts.count() == 3
    text = page.inner_text("body")
    assert "Bottleneck" in text
    assert "actor.generate[0]" in page.locator(".js-plotly-plot").first.inner_text()
    assert "Traceback" not in text
    shot(page, "simulate")


def test_a_mistake_in_the_text_is_told_with_its_line(page, address: str) -> None:
    page.goto(address)
    box = page.locator("textarea")
    box.wait_for()
    settled(page)
    box.fill(box.input_value().replace("seed: 7", "sed: 7"))
    page.get_by_role("button", name="Simulate", exact=True).click()
    page.get_by_text("did you mean").wait_for()
    text = page.inner_text("body")
    assert "quickstart.yaml:4" in text and "Traceback" not in text
    shot(page, "mistake")


def test_an_uploaded_file_that_is_no_text_is_told_in_one_message(page, address: str) -> None:
    page.goto(address)
    page.get_by_text("or a file of your own").wait_for()
    content = {"name": "mine.yaml", "mimeType": "application/yaml", "buffer": b"name: mine\nseed: \xff\xfe"}
    page.locator("input[type=file]").set_input_files([content])
    page.get_by_text("is not UTF-8").wait_for()
    text = page.inner_text("body")
    assert "mine.yaml:2" in text and "Traceback" not in text


def test_two_runs_are_compared(page, address: str) -> None:
    page.goto(f"{address}/compare")
    page.get_by_text("What explains the difference").wait_for()
    page.locator(".js-plotly-plot").nth(1).wait_for()
    gantt = page.locator(".js-plotly-plot").first.inner_text()
    assert "predicted" in gantt and "measured" in gantt
    assert "seconds since step 12 began" in page.locator(".js-plotly-plot").nth(1).inner_text()
    assert "Traceback" not in page.inner_text("body")
    shot(page, "compare")


def test_the_report_draws_both_gantts_without_network_or_errors(page, folder: Path) -> None:
    from lab import runs
    from lab.cli.compare import side_by_side

    first, second = (runs.read(run) for run in runs.list_runs(folder / "runs"))
    report = Path(side_by_side(first, [second], folder / "compared")["report"])
    requests = []
    page.on("request", lambda request: requests.append(request.url))
    page.goto(report.as_uri())
    page.locator("#chart-1 .bars .point").first.wait_for(state="attached")
    lanes = page.locator("#chart-1").inner_text()
    assert lanes.count("actor.generate[0]") == 2
    assert "predicted" in lanes and "measured" in lanes
    assert page.errors == []
    assert [url for url in requests if not url.startswith(("file:", "data:", "blob:"))] == []
    shot(page, "report")
