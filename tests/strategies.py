"""What tests draw: lawful timelines that need no simulator, and small scenarios for it.

A timeline is the earliest schedule of a scenario's dataflow with drawn durations, a max-plus evaluation of the marked
graph: every stage starts when all its requirements have ended. It shares no code with the simulator, so it is also an
independent reference for it.
"""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

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
    shipped = SCENARIOS[name]
    schedule = {"mode": mode, "scoring": shipped.schedule.scoring}
    return shipped.replace({"schedule": schedule, "num_steps": num_steps, "checkpoint": {"every_steps": 2}})


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


def changed(name: str, *parts: Mapping[str, Any]) -> Scenario:
    """A shipped scenario with parts of it replaced, however deep they lie; a distribution as a whole."""
    data: Any = _ALL[name].model_dump(mode="json", by_alias=True)
    for part in parts:
        data = _merged(data, part)
    return Scenario.model_validate(data, strict=False)


def _merged(data: Any, changes: Any) -> Any:
    if not (isinstance(data, Mapping) and isinstance(changes, Mapping)) or "dist" in changes:
        return changes
    return dict(data) | {key: _merged(data.get(key), value) for key, value in changes.items()}


SHORT = {"dist": "lognormal", "mean": 40, "p95": 110, "max": 160}
PROMPTS = {"dist": "lognormal", "mean": 30, "p95": 60, "max": 80}
TIGHT = 20e6
"""bytes of KV that hold the longest of these sequences, and few of them at once"""
MODES = ("synchronous", "one_step_off", "asynchronous")


@st.composite
def on_gpus(draw: st.DrawFn, modes: tuple[str, ...] = MODES, loss: bool = False) -> Scenario:
    """Small work for sixteen GPUs, where every worker has devices of its own; with `loss` somebody may fail."""
    mode, name = draw(st.sampled_from(modes)), draw(st.sampled_from(["ppo", "grpo"]))
    prompts, samples = draw(st.sampled_from([6, 12])), draw(st.sampled_from([2, 4] if name == "grpo" else [1, 3]))
    engines = [{"pool": "rollout", "engines": 2}]
    if extra := draw(st.integers(0, 2)):
        engines.append({"pool": "spare", "engines": extra, "speed": draw(st.sampled_from([0.5, 1.0]))})
    checkpoint = {
        "every_steps": draw(st.sampled_from([1, 2] if loss else [None, 1, 2])),
        "blocking": draw(st.booleans()),
    }
    changes = {
        "num_steps": draw(st.integers(2, 4)),
        "seed": draw(st.integers(0, 99)),
        "algorithm": {"name": name, "kl_coef": draw(st.sampled_from([0.0, 0.05])), "ppo_epochs": draw(st.integers(1, 2))},
        "place": {"actor.generate": engines, "actor.train": {"data_parallel": draw(st.sampled_from([1, 3]))}},
        "workload": {"prompts_per_step": prompts, "samples_per_prompt": samples,
                     "prompt_tokens": PROMPTS, "response_tokens": SHORT},
        "rollout": {"max_num_seqs": draw(st.sampled_from([2, 8, 64])), "kv_bytes": draw(st.sampled_from([None, TIGHT])),
                    "dispatch": draw(st.sampled_from(["round_robin", "weighted", "least_loaded", "length_buckets"])),
                    "prefix_caching": draw(st.booleans())},
        "update": {"minibatch_samples": prompts * samples // 2, "microbatch_tokens": draw(st.sampled_from([300, 4096]))},
        "schedule": {"mode": mode, "scoring": draw(st.sampled_from(["batch", "sample"]))},
        "checkpoint": checkpoint,
    }  # fmt: skip
    own = draw(_continuous(prompts * samples, samples) if mode == "asynchronous" else _with_barrier(loss))
    return changed("ppo-7b-16gpu", {"algorithm": None}, changes, own)


@st.composite
def _continuous(draw: st.DrawFn, step: int, prompt: int) -> dict[str, Any]:
    """What only an asynchronous schedule has."""
    half = draw(st.booleans())
    staleness = draw(stalenesses(2 if half else 1))
    in_flight = draw(st.sampled_from(["drain", "interrupt", "mix"]))
    sync = {"trigger": draw(st.sampled_from(["push", "event"])), "in_flight": in_flight}
    sync |= {"kv": draw(st.sampled_from(["keep", "recompute"]))} if in_flight == "mix" else {}
    pressure = draw(st.sampled_from(["pause", "throttle"]))
    return {
        "schedule": {"staleness": staleness, "trigger_samples": step // 2 if half else None},
        "buffer": {"at_high": pressure}, "weight_sync": sync,
    }  # fmt: skip


@st.composite
def stalenesses(draw: st.DrawFn, batches: int) -> dict[str, Any]:
    """Every unit with every rule at the bound; `batches` of a step."""
    unit = draw(st.sampled_from(["versions", "steps", "batches", "extra_samples"]))
    bound = draw(st.integers(batches - 1, 2 * batches) if unit == "batches" else st.integers(0, 2))
    part = draw(st.sampled_from([0.0, 0.5])) if unit == "extra_samples" else 0.0
    return {"unit": unit, "bound": bound + part,
            "at_bound": draw(st.sampled_from(["block", "drop", "down_weight", "interrupt"]))}  # fmt: skip


@st.composite
def _with_barrier(draw: st.DrawFn, loss: bool) -> dict[str, Any]:
    """What no asynchronous schedule has."""
    rollout = {"stealing": draw(st.booleans()), "over_issue": draw(st.sampled_from([0.0, 0.3]))}
    return {"rollout": rollout}


@st.composite
def on_cores(draw: st.DrawFn, modes: tuple[str, ...] = MODES) -> Scenario:
    """Small work for two cores that all workers share."""
    name, mode = draw(st.sampled_from(["quickstart", "ppo-tiny"])), draw(st.sampled_from(modes))
    prompts, samples = draw(st.sampled_from([4, 8])), draw(st.integers(2, 4))
    train = {"data_parallel": draw(st.sampled_from([1, 2])), "zero_stage": draw(st.integers(0, 3))}
    engine = {"pool": "all", "engines": draw(st.integers(1, 3)), "threads": 1}
    changes = {
        "num_steps": draw(st.integers(1, 3)),
        "seed": draw(st.integers(0, 99)),
        "algorithm": {"kl_coef": draw(st.sampled_from([0.0, 0.1]))},
        "place": {"actor.train": train, "actor.generate": [engine]},
        "workload": {"prompts_per_step": prompts, "samples_per_prompt": samples},
        "rollout": {"max_num_seqs": draw(st.integers(1, 32)), "kv_bytes": draw(st.sampled_from([1.5e6, 64e6]))},
        "update": {"minibatch_samples": prompts * samples // 2},
        "schedule": {"mode": mode, "scoring": draw(st.sampled_from(["batch", "sample"]))},
        "checkpoint": {"every_steps": draw(st.sampled_from([None, 1, 2]))},
    }
    own = draw(_continuous(prompts * samples, samples)) if mode == "asynchronous" else {}
    return changed(name, changes, own)
