"""A simulation may be stopped at any time: every sample is somewhere, room is never overdrawn, and it goes on as if not."""

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from lab.metrics import publications
from lab.scenario import Scenario
from lab.schedule import limits, staleness
from simulator.world import World
from tests.plays import FATES, Played, ended_by, fresh, play, start
from tests.strategies import on_cores, on_gpus

SHARES = st.lists(st.floats(0, 1), min_size=1, max_size=5).map(sorted)


def stops(played: Played, shares: list[float]) -> list[tuple[float, World]]:
    """The same scenario again, halted at shares of its length."""
    world = fresh(played.scenario)
    start(world)
    for share in shares:
        time = share * played.makespan
        if time > world.now:
            world.env.run(until=time)
        yield time, world


def trained_by(played: Played, time: float) -> int:
    """Samples whose update had begun."""
    first = played.scenario.algorithm.trains[0]
    spans = [span for span in played.stages(f"update_{first}") if span.start_s < time]
    return sum(len(played.world.ledger.batches[step]) for step in {span.step for span in spans})


@given(st.one_of(on_gpus(), on_cores()), SHARES)
@settings(max_examples=20)
def test_at_every_stop_each_sample_is_somewhere(chosen: Scenario, shares: list[float]) -> None:
    """What is trained is what updates have begun with; what is back is what engines have ended."""
    played, before = play(chosen), Counter[str]()
    for time, world in stops(played, shares):
        counts = Counter(world.ledger.counts())
        assert counts["issued"] == sum(counts[fate] for fate in FATES)
        assert counts["trained"] == trained_by(played, time)
        for growing in ("issued", "trained", "dropped", "aborted"):
            assert counts[growing] >= before[growing]
        before = counts
        if chosen.schedule.mode != "asynchronous":
            back = counts["trained"] + counts["buffered"] + counts["dropped"]
            rollouts = played.stages("rollout")
            assert sum(span.attrs["samples"] for span in rollouts if span.end_s < time) <= back
            assert back <= sum(span.attrs["samples"] for span in rollouts if span.start_s <= time)


@given(on_gpus(modes=("asynchronous",)), SHARES)
@settings(max_examples=12)
def test_the_buffer_is_never_above_its_capacity(chosen: Scenario, shares: list[float]) -> None:
    """Room is kept for a sample from its issue to the end of the updates on its batch."""
    played = play(chosen)
    capacity = limits(chosen.schedule, chosen.buffer, chosen.workload.samples_per_step).capacity_samples
    for time, world in stops(played, shares):
        counts, done = world.ledger.counts(), ended_by(played, time, "update_")
        taken = [len(batch) for step, batch in world.ledger.batches.items() if step in done]
        held = counts["in_flight"] + counts["buffered"] + counts["trained"] - sum(taken)
        assert 0 <= held <= capacity


@given(st.one_of(on_gpus(), on_cores()), SHARES)
@settings(max_examples=6)
def test_a_stop_changes_nothing(chosen: Scenario, shares: list[float]) -> None:
    played = play(chosen)
    for _, world in stops(played, shares):
        last = world
    last.env.run(until=last.env.all_of(last.last()))
    ends = {span.span_id: span.end_s for span in last.spans if not span.op}
    again = {span.span_id: span.end_s for span in played.stages_all()}
    assert {name: again[name] for name in ends} == ends


@given(on_gpus(modes=("asynchronous",)), SHARES)
@settings(max_examples=12)
def test_no_more_is_issued_than_the_bound_lets_be_trained(chosen: Scenario, shares: list[float]) -> None:
    """Under `block`: version w may be behind at most the first n·w + bound + 1 batches, those that were thrown away aside."""
    rule = staleness(chosen.schedule, chosen.workload.samples_per_step)
    if rule.at_bound != "block":
        return
    played = play(chosen)
    published = publications(played.timeline)
    for time, world in stops(played, shares):
        version = sum(end <= time for end in published)
        kept = len(world.ledger) - sum(world.ledger.counts()[fate] for fate in ("dropped", "aborted", "lost"))
        assert kept <= (rule.units_per_version * version + rule.bound + 1) * rule.samples_per_unit
