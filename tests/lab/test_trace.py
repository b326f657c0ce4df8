"""Chrome traces: slices of a track nest, every event finds its track, and our own export reads back exactly."""

import json
from collections import defaultdict
from typing import Any

import pytest
from hypothesis import given, settings

from lab.timeline import Timeline
from lab.trace import from_chrome, to_chrome
from tests.strategies import play, scenario, timelines


def events(timeline: Timeline, *kinds: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(to_chrome({"predicted": timeline}))["traceEvents"]
    return [event for event in found if event["ph"] in kinds]


@settings(max_examples=50)
@given(timelines(), timelines(origin="measured"))
def test_our_own_export_reads_back_exactly(predicted: Timeline, measured: Timeline) -> None:
    pair = {"predicted": predicted, "measured": measured}
    found = from_chrome(to_chrome(pair))
    assert list(found) == list(pair)
    for label, timeline in pair.items():
        assert (found[label].header, set_of(found[label])) == (timeline.header, set_of(timeline))
        assert found[label].digest() == timeline.digest()


def set_of(timeline: Timeline) -> dict[str, Any]:
    return {span.span_id: span for span in timeline.spans}


@settings(max_examples=50)
@given(timelines())
def test_slices_of_one_track_nest(timeline: Timeline) -> None:
    tracks = defaultdict[tuple[int, int], list[tuple[int, int]]](list)
    for event in events(timeline, "X"):
        assert event["dur"] >= 0
        tracks[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    assert sum(map(len, tracks.values())) == len(timeline.spans)
    for slices in tracks.values():
        around: list[tuple[int, int]] = []
        for start, end in slices:  # in the order of the file
            while around and around[-1][1] <= start and around[-1] != (start, end):
                around.pop()
            assert not around or around[-1][0] <= start <= end <= around[-1][1]
            around.append((start, end))


def test_the_two_timelines_are_stacked_as_processes_of_pools_with_a_thread_for_each_worker() -> None:
    timeline = play(scenario("ppo-7b-16gpu"), lambda *_: 1.0)
    content = json.loads(to_chrome({"predicted": timeline, "measured": timeline}))["traceEvents"]
    names = {(e["name"], e["pid"], e["tid"]): e["args"]["name"] for e in content if e["name"].endswith("_name")}
    processes = [name for (kind, *_), name in names.items() if kind == "process_name"]
    assert processes == [f"{side}: {pool}" for side in ("predicted", "measured") for pool in timeline.header.pools]
    for event in content:
        if event["ph"] == "X":
            assert names["thread_name", event["pid"], event["tid"]] == event["args"]["worker"]
            assert names["process_name", event["pid"], 0] == f"{event['cat']}: {event['args']['pool']}"


def test_weights_flow_from_each_sync_to_the_rollouts_that_use_them() -> None:
    timeline = play(scenario("ppo-7b-16gpu", num_steps=4), lambda *_: 1.0)
    begins, ends = events(timeline, "s"), events(timeline, "f")
    assert len(begins) == len(ends) == 2 * 3  # two engines, and the first step has no sync before it
    assert [flow["id"] for flow in begins] == [flow["id"] for flow in ends]
    slices = events(timeline, "X")
    for flow, stage in [*((f, "weight_sync") for f in begins), *((f, "rollout") for f in ends)]:
        place = (flow["pid"], flow["tid"])
        inside = [e for e in slices if (e["pid"], e["tid"]) == place and e["ts"] <= flow["ts"] <= e["ts"] + e["dur"]]
        assert stage in {event["name"] for event in inside}
    assert all(begin["ts"] <= end["ts"] for begin, end in zip(begins, ends, strict=True))


@pytest.mark.parametrize(
    "content", [b"", b"[]", b"{}", b'{"traceEvents": []}', b'{"traceEvents": [{"ph": "X"}], "lab": {}}']
)
def test_any_other_trace_is_refused(content: bytes) -> None:
    with pytest.raises(ValueError, match="not a trace that the lab wrote"):
        from_chrome(content)
