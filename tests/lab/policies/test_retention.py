from hypothesis import given
from hypothesis import strategies as st

from lab.policies.retention import Checkpoint, Retention, kept

checkpoints = st.lists(
    st.builds(
        Checkpoint,
        step=st.integers(0, 60),
        score=st.none() | st.integers(0, 5).map(float),
        complete=st.booleans(),
        resumable=st.booleans(),
    ),
    max_size=20,
    unique_by=lambda one: one.step,
)
rules = st.builds(
    Retention,
    latest=st.integers(0, 4),
    best=st.integers(0, 4),
    milestone_every=st.none() | st.integers(1, 20),
    recovery=st.booleans(),
)


@given(rules, checkpoints, st.sets(st.integers(0, 60), max_size=3))
def test_what_must_be_kept_is_kept_and_nothing_else(
    rule: Retention, stored: list[Checkpoint], in_use: set[int]
) -> None:
    said = kept(rule, stored, in_use)
    complete = sorted((one for one in stored if one.complete), key=lambda one: one.step)
    newest = max((one.step for one in complete), default=-1)
    scored = [one for one in complete if one.score is not None]
    must = {one.step for one in complete[len(complete) - min(rule.latest, len(complete)) :]}
    must |= {one.step for one in complete if rule.milestone_every and one.step % rule.milestone_every == 0}
    must |= {one.step for one in complete if one.step in in_use}
    must |= (
        {max(one.step for one in complete if one.resumable)}
        if rule.recovery and any(one.resumable for one in complete)
        else set()
    )
    must |= {one.step for one in stored if not one.complete and one.step > newest}
    for one in scored:
        better = [x for x in scored if x.score > one.score or (x.score == one.score and x.step > one.step)]
        must |= {one.step} if len(better) < rule.best else set()
    assert set(said.keep) == must
    assert sorted([*said.keep, *said.delete]) == sorted(one.step for one in stored)


@given(rules, checkpoints)
def test_keeping_twice_is_keeping_once(rule: Retention, stored: list[Checkpoint]) -> None:
    left = [one for one in stored if one.step in kept(rule, stored).keep]
    assert kept(rule, left).delete == ()


@given(rules, checkpoints)
def test_a_run_can_always_go_on(rule: Retention, stored: list[Checkpoint]) -> None:
    left = set(kept(Retention(latest=rule.latest, best=rule.best, recovery=True), stored).keep)
    able = [one.step for one in stored if one.complete and one.resumable]
    assert not able or max(able) in left


def test_every_reason_is_named() -> None:
    stored = [Checkpoint(step=step, score=float(-step)) for step in (10, 20, 30, 40)]
    stored += [
        Checkpoint(step=50, resumable=False),
        Checkpoint(step=60, complete=False),
        Checkpoint(step=15, complete=False),
    ]
    said = kept(Retention(latest=1, best=1, milestone_every=20, recovery=True), stored, {30})
    assert said.keep == {
        10: ("best",),
        20: ("milestone",),
        30: ("in_use",),
        40: ("milestone", "recovery"),
        50: ("latest",),
        60: ("being_written",),
    }
    assert said.delete == (15,)
