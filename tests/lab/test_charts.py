"""Figures: what is drawn is what the timeline says, on the lanes and in the colours it always has."""

import itertools
import json
from typing import Any

import msgspec
import plotly.graph_objects as go
import pytest
from hypothesis import given, settings

from lab import charts
from lab.metrics import publications, step_times, summarise
from lab.timeline import Timeline
from tests.strategies import play, scenario, timelines


def bars(figure: dict[str, Any], axis: str = "y") -> list[tuple[str, str, float, float]]:
    """(stage, worker, start, seconds) of every bar of a Gantt chart."""
    return sorted(
        (trace["name"], *bar)
        for trace in figure["data"]
        if trace["yaxis"] == axis
        for bar in zip(trace["y"], trace["base"], trace["x"], strict=True)
    )


def spans(timeline: Timeline) -> list[tuple[str, str, float, float]]:
    return sorted((s.stage, s.worker, round(s.start_s, 6), round(s.seconds, 6)) for s in timeline.stages())


@settings(max_examples=50)
@given(timelines(), timelines(origin="measured"))
def test_every_stage_span_is_a_bar_on_its_workers_lane(predicted: Timeline, measured: Timeline) -> None:
    figure = charts.gantts({"predicted": predicted, "measured": measured})
    assert bars(figure) == spans(predicted)
    assert bars(figure, "y2") == spans(measured)
    assert figure["layout"]["yaxis"]["categoryarray"] == list(predicted.header.lanes)[::-1]
    assert {trace["xaxis"] for trace in figure["data"]} == {"x"}
    go.Figure(figure)  # raises for anything that plotly would not draw


@settings(max_examples=50)
@given(timelines())
def test_one_step_shows_exactly_that_step_from_its_start(timeline: Timeline) -> None:
    for step, seconds in enumerate(step_times(timeline)):
        drawn = bars(charts.one_step({"it": timeline}, step))
        assert min(start for *_, start, _ in drawn) >= 0
        assert max(start + width for *_, start, width in drawn) == pytest.approx(seconds, abs=2e-6)
    assert bars(charts.one_step({"it": timeline}, len(publications(timeline)))) == []


def test_a_stage_has_one_colour_in_every_chart_and_a_single_entry_in_the_legend() -> None:
    timeline = play(scenario("ppo-7b-16gpu"), lambda *_: 1.0)
    figure = charts.gantts({"a": timeline, "b": timeline})
    shown = [trace["name"] for trace in figure["data"] if trace["showlegend"]]
    assert sorted(shown) == sorted({span.stage for span in timeline.stages()})
    accounts = charts.accounts({"a": summarise(timeline)["pools"]})
    colours = {(trace["name"], trace["marker"]["color"]) for trace in [*figure["data"], *accounts["data"]]}
    assert len({name for name, _ in colours}) == len(colours)
    solid = [colour for name, colour in colours if name in shown]
    assert len(set(solid)) == len(solid)


def test_waiting_is_a_pale_tone_of_the_awaited_stage() -> None:
    assert charts.colour("waiting:rollout") == "#BFDBEB"  # a quarter of #0072B2 on white
    assert charts.colour("waiting:something new") == charts.colour("waiting:else")


def test_bars_of_accounts_are_the_shares_of_every_pool() -> None:
    pools = summarise(play(scenario("ppo-7b-16gpu"), lambda *_: 1.0))["pools"]
    figure = charts.accounts({"predicted": pools, "measured": pools})
    heights = [sum(trace["x"][i] for trace in figure["data"]) for i in range(2 * len(pools))]
    assert heights == pytest.approx([1] * 2 * len(pools))
    assert figure["data"][0]["y"][0] == "actors · predicted"
    assert figure["data"][-1]["name"] == "idle"


def test_lines_of_step_times_and_rewards() -> None:
    timeline = play(scenario(num_steps=4), lambda *_: 1.0, "measured")
    assert charts.steps({"measured": timeline})["data"][0]["y"] == step_times(timeline)
    assert charts.rewards({"measured": timeline}) is None
    learning = [{"step": k, "reward": k / 4} for k in range(4)]
    header = msgspec.structs.replace(timeline.header, learning=learning)
    drawn = charts.rewards({"measured": msgspec.structs.replace(timeline, header=header)})
    assert drawn is not None
    assert (drawn["data"][0]["x"], drawn["data"][0]["y"]) == ([0, 1, 2, 3], [0, 0.25, 0.5, 0.75])


def test_learning_has_a_small_chart_for_each_number_that_moves() -> None:
    timeline = play(scenario(num_steps=3), lambda *_: 1.0, "measured")
    rows: list[dict[str, float]] = [{"step": k, "kl": k / 2, "temperature": 1.0} for k in range(3)]
    rows[2]["evaluation_reward"], rows[0]["evaluation_reward"] = 0.5, 0.1
    header = msgspec.structs.replace(timeline.header, learning=rows)
    drawn = charts.learning({"measured": msgspec.structs.replace(timeline, header=header)})
    assert drawn is not None and charts.learning({"measured": timeline}) is None
    lines = {trace["yaxis"]: (trace["x"], trace["y"]) for trace in drawn["data"]}
    assert [head["text"] for head in drawn["layout"]["annotations"]] == ["kl", "evaluation reward"]
    assert lines == {"y1": ([0, 1, 2], [0, 0.5, 1]), "y2": ([0, 2], [0.1, 0.5])}


def test_a_name_that_looks_like_html_is_shown_and_not_run() -> None:
    nasty = scenario().replace({"pools": {"<img src=x>": "local[0:2]"}, "sharing": {"<img src=x>": {"how": "resident"}},
                                "place": {key: _elsewhere(part) for key, part in _place().items()}})  # fmt: skip
    timeline = play(nasty, lambda *_: 1.0)
    drawn = json.dumps([charts.gantt(timeline), charts.accounts({"<b>": summarise(timeline)["pools"]})])
    assert "<img" not in drawn and "&lt;img src=x&gt;" in drawn


def _place() -> dict[str, Any]:
    return {key: part for key, part in scenario().model_dump(mode="json", by_alias=True)["place"].items() if part}


def _elsewhere(part: Any) -> Any:
    return [_elsewhere(item) for item in part] if isinstance(part, list) else part | {"pool": "<img src=x>"}


def struck(timeline: Timeline, *faults: tuple[float, str]) -> Timeline:
    found = [{"at_s": at, "kind": "worker_lost", "target": target} for at, target in faults]
    return msgspec.structs.replace(timeline, header=msgspec.structs.replace(timeline.header, faults=found))


def marks(figure: dict[str, Any], axis: str = "y") -> list[tuple[float, str]]:
    return [
        mark
        for trace in figure["data"]
        if trace["name"] == "fault" and trace["yaxis"] == axis
        for mark in zip(trace["x"], trace["y"], strict=True)
    ]


def test_a_fault_is_marked_on_the_lane_of_whom_it_struck_and_in_its_step_alone() -> None:
    timeline = play(scenario(num_steps=3), lambda *_: 1.0)
    ends, (first, *_, lane) = [0.0, *publications(timeline)], timeline.header.lanes
    hit = struck(timeline, (ends[1] + 0.25, lane), (ends[2] + 0.5, "buffer"))
    figure = charts.gantts({"calm": timeline, "hit": hit})
    assert marks(figure) == [] and marks(figure, "y2") == [(ends[1] + 0.25, lane), (ends[2] + 0.5, first)]
    assert [trace["showlegend"] for trace in figure["data"] if trace["name"] == "fault"] == [True]
    go.Figure(figure)
    assert [marks(charts.one_step({"hit": hit}, step)) for step in range(3)] == [[], [(0.25, lane)], [(0.5, first)]]


def read(moments: dict[str, list[float]]) -> Any:
    import pyarrow as pa

    rows = [
        {"kind": kind, "name": name, "at_s": at, "use": 0.5, "memory_bytes": 2e9}
        for name, times in moments.items()
        for at in times
        for kind in ["device" if name.startswith("core") else "worker"]
    ]
    return pa.Table.from_pylist(rows)


def test_no_line_is_drawn_over_the_time_in_which_a_process_was_away() -> None:
    figure = charts.devices(read({"core0": [0, 1, 2, 3, 4, 5, 6], "engine": [0, 1, 2, 60, 61, 62]}))
    assert figure is not None
    go.Figure(figure)
    for trace in figure["data"]:
        away = [at for at, value in zip(trace["x"], trace["y"], strict=True) if value is None]
        assert away == ([2] if trace["name"] == "engine" else [])


def test_every_process_has_a_colour_of_its_own_and_one_entry_in_the_legend() -> None:
    names = ["core0", "core1", "driver", "buffer", *(f"actor.generate[{i}]" for i in range(6))]
    figure = charts.devices(read({name: [0.0, 1.0] for name in names}))
    assert figure is not None
    shown = [trace["name"] for trace in figure["data"] if trace["showlegend"]]
    assert sorted(shown) == sorted(names)
    colours: dict[str, set[str]] = {}
    for trace in figure["data"]:
        if not trace["name"].startswith("core"):
            colours.setdefault(trace["line"]["color"], set()).add(trace["name"])
    assert all(len(found) == 1 for found in colours.values())
    domains = sorted(axis["domain"] for name, axis in figure["layout"].items() if name.startswith("yaxis"))
    assert len(domains) == 3
    assert all(one[1] + 0.05 < other[0] for one, other in itertools.pairwise(domains)), "room for titles"
