"""Lawful timelines that need no simulator: the earliest schedule of a scenario's dataflow, with drawn durations.

A max-plus evaluation of the marked graph: every stage starts when all its requirements have ended. It shares no code
with the simulator, so it is also an independent reference for it.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
from hypothesis import strategies as st

from lab.dataflow import Dataflow
from lab.load import load
from lab.scenario import Scenario
from lab.timeline import Span, Timeline, header_of
from lab.wiring import build


def _any_order(scenario: Scenario) -> bool:
    """Whether it has a barrier, and nobody takes turns: then it goes with either order of rollout and training."""
    sliced = any(sharing.how == "time_sliced" for sharing in scenario.sharing.values())
    return scenario.schedule.mode != "asynchronous" and not sliced


_ALL = {path.stem: load(path) for path in sorted(Path("scenarios").glob("*.yaml"))}
SCENARIOS = {name: scenario for name, scenario in _ALL.items() if _any_order(scenario)}
OPS = {
    "rollout": ("prefill", "decode"),
    "reference": ("forward",),
    "value": ("forward",),
    "update_actor": ("forward", "backward", "grad_sync", "optimizer"),
    "update_critic": ("forward", "backward", "grad_sync", "optimizer"),
    "weight_sync": ("transfer",),
    "checkpoint": ("write",),
}
Seconds = Callable[[str, int, str], float]
"""how long a worker takes for a stage in a step, and how late the stage is dispatched (worker `dispatch`)"""


def scenario(name: str = "quickstart", mode: str = "synchronous", num_steps: int = 3) -> Scenario:
    """A shipped scenario with another schedule and length."""
    return SCENARIOS[name].replace(
        {"schedule": {"mode": mode}, "num_steps": num_steps, "checkpoint": {"every_steps": 2}}
    )


def play(scenario: Scenario, seconds: Seconds, origin: str = "simulated") -> Timeline:
    """The earliest lawful timeline of a scenario whose stages take so long."""
    graph, ends, spans = build(scenario), dict[tuple[str, int], float](), list[Span]()
    for stage, step in _order(graph):
        start = max((ends[key] for key in graph.requirements(stage, step)), default=0.0) + seconds(
            stage, step, "dispatch"
        )
        own = [
            _stage(graph, stage, step, worker, start, start + seconds(stage, step, worker))
            for worker in graph.nodes[stage].workers
        ]
        ends[stage, step] = max(span.end_s for span in own)
        spans += [part for span in own for part in (span, *_ops(span))]
    issued = scenario.workload.samples_per_step * scenario.num_steps
    header = msgspec.structs.replace(header_of(scenario, origin), samples={"issued": issued, "trained": issued})
    return Timeline.of(header, spans)


def _order(graph: Dataflow) -> Iterator[tuple[str, int]]:
    """Every (stage, step) after all that it needs."""
    done = set[tuple[str, int]]()
    pending = [
        (stage, step) for step in range(graph.num_steps) for stage in graph.nodes if graph.nodes[stage].runs(step)
    ]
    while pending:
        ready = [key for key in pending if done.issuperset(graph.requirements(*key))]
        assert ready, "the dataflow is stuck"
        yield from ready
        done.update(ready)
        pending = [key for key in pending if key not in done]


def _stage(graph: Dataflow, stage: str, step: int, worker: str, start: float, end: float) -> Span:
    causes = [
        f"{name}/{k}/{other}" for name, k in graph.requirements(stage, step) for other in graph.nodes[name].workers
    ]
    return Span(
        span_id=f"{stage}/{step}/{worker}",
        cause_ids=tuple(sorted(causes)),
        resource=worker,
        worker=worker,
        pool=graph.workers[worker].pool,
        step=step,
        stage=stage,
        start_s=start,
        end_s=end,
        policy_version=graph.policy_version(stage, step),
        tokens=100,
        attrs={"samples": 8, "prompt_tokens": 96, "response_tokens": 200, "preemptions": 1}
        if stage == "rollout"
        else {},
    )


def _ops(stage: Span) -> Iterator[Span]:
    """Equal ops that fill a stage but for a margin at its start, where the host works."""
    names = OPS.get(stage.stage, ())
    begin, width = stage.start_s + 0.1 * stage.seconds, 0.9 * stage.seconds / max(len(names), 1)
    for i, op in enumerate(names):
        start = begin + i * width
        yield Span(
            span_id=f"{stage.span_id}#{i}",
            cause_ids=(stage.span_id,),
            resource=stage.resource,
            worker=stage.worker,
            pool=stage.pool,
            step=stage.step,
            stage=stage.stage,
            op=op,
            start_s=start,
            end_s=min(start + width, stage.end_s),
        )


@st.composite
def timelines(draw: st.DrawFn, of: Scenario | None = None, origin: str = "simulated") -> Timeline:
    """A lawful timeline of a drawn, or the given, scenario; durations differ by up to five orders of magnitude."""
    chosen = of or scenario(
        draw(st.sampled_from(sorted(SCENARIOS))),
        draw(st.sampled_from(["synchronous", "one_step_off"])),
        draw(st.integers(1, 4)),
    )
    random, late = draw(st.randoms(use_true_random=False)), draw(st.sampled_from([0.0, 0.01]))

    def seconds(stage: str, step: int, worker: str) -> float:
        return late * random.random() if worker == "dispatch" else 10 ** random.uniform(-3, 2)

    return play(chosen, seconds, origin)
