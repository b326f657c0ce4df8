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
    must |= {one.step for one in complete if rule.milestone_every and (one.step + 1) % rule.milestone_every == 0}
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
    stored = [Checkpoint(step=step, score=float(-step)) for step in (9, 19, 29, 39)]
    stored += [
        Checkpoint(step=49, resumable=False),
        Checkpoint(step=59, complete=False),
        Checkpoint(step=14, complete=False),
    ]
    said = kept(Retention(latest=1, best=1, milestone_every=20, recovery=True), stored, {29})
    assert said.keep == {
        9: ("best",),
        19: ("milestone",),
        29: ("in_use",),
        39: ("milestone", "recovery"),
        49: ("latest",),
        59: ("being_written",),
    }
    assert said.delete == (14,)


@given(st.integers(1, 10), st.integers(1, 5))
def test_milestones_fall_on_checkpoints_of_the_interval(every: int, times: int) -> None:
    """A checkpoint is written after every so many steps, a milestone is one after a multiple of them."""
    saved = [step for step in range(every * times * 3) if (step + 1) % every == 0]
    said = kept(Retention(latest=0, milestone_every=every * times, recovery=False), [Checkpoint(step=k) for k in saved])
    assert list(said.keep) == [every * times * k - 1 for k in (1, 2, 3)]
