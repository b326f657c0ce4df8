from __future__ import annotations

from typing import Annotated, Any

import typer

from lab.cli.options import ClusterFile, Json, ScenarioFile

Check = Annotated[bool, typer.Option("--check", help="Exit with 1 where the scenario does not fit.")]


def fit_memory(
    scenario: ScenarioFile, json: Json = False, cluster: ClusterFile = None, check: Check = False
) -> None:  # fmt: skip
    """Say whether a scenario fits in memory, what takes it, and the least that would make it fit.

    Exits with 0 whatever the answer, and with 2 for a wrong file; with --check, 1 where the scenario does not fit.
    """
    from json import dumps

    from lab.cli.simulate import read
    from lab.load import located
    from profiles.footprint_measures import answer

    with located(scenario):
        given = read(scenario, cluster)
        found = answer(given)
    if json:
        print(dumps(_told(given.name, found), ensure_ascii=False, allow_nan=False))
    else:
        _show(given.name, found)
    if check and not all(one.memory.fits for one in found.values()):
        raise typer.Exit(1)


def _told(name: str, answers: dict[str, Any]) -> dict[str, Any]:
    """The answer for programs; sizes in bytes."""
    return {
        "scenario": name,
        "fits": all(one.memory.fits for one in answers.values()),
        "pools": {pool: _pool(one) for pool, one in answers.items()},
    }


def _pool(one: Any) -> dict[str, Any]:
    memory = one.memory
    return {
        "device": memory.device,
        "sharing": memory.how,
        "capacity_bytes": memory.capacity_bytes,
        "peak_bytes": memory.peak_bytes,
        "one_at_a_time_bytes": memory.largest_bytes,
        "fits": memory.fits,
        "short": memory.short,
        "host_bytes": memory.host_bytes,
        "consumers": [{"worker": worker, "what": what, "bytes": size} for worker, what, size in memory.consumers],
        "instants": {name: held.instant for name, held in memory.workers.items()},
        "possible": [
            _effect(effect) | {"saved_bytes": effect.saved_bytes, "fits": effect.fits} for effect in one.possible
        ],
        "taken": [
            _effect(taken)
            | {"saved_bytes": taken.saved_bytes, "fits_without": taken.fits_without, "instead": _labels(taken.instead)}
            for taken in one.taken
        ],
        "least": None if one.least is None else _labels(one.least),
    }


def _effect(one: Any) -> dict[str, Any]:
    return {"measure": one.measure.label, "key": one.measure.yaml_key}


def _labels(measures: Any) -> list[str]:
    return [measure.label for measure in measures]


def _show(name: str, answers: dict[str, Any]) -> None:
    """Tables for a person."""
    from rich.console import Console

    console = Console()
    unused = [pool for pool, one in answers.items() if not one.memory.workers]
    for pool, one in answers.items():
        if pool not in unused:
            _show_pool(console, pool, one)
    fits = all(one.memory.fits for one in answers.values())
    line = f"{name} fits" if fits else f"{name} does NOT fit"
    console.print(line + (f"; nothing is placed on {', '.join(unused)}" if unused else ""), highlight=False)


def _show_pool(console: Any, pool: str, one: Any) -> None:
    from rich.table import Table

    memory = one.memory
    title = f"pool {pool}: {size(memory.peak_bytes)} of {size(memory.capacity_bytes)} on {memory.device}"
    title += ", fits" if memory.fits else ", does NOT fit"
    table = Table("worker", "what", "size", title=title, title_justify="left")
    table.columns[2].justify = "right"
    least = memory.peak_bytes / 200
    for worker, what, amount in memory.consumers:
        if amount >= least:
            table.add_row(worker, what, size(amount))
    rest = sum(amount for _, _, amount in memory.consumers if amount < least)
    if rest > 0:
        table.add_row("", "the rest", size(rest))
    console.print(table)
    for line in _lines(one):
        console.print(line, highlight=False, soft_wrap=True, markup=False)
    console.print()


def _lines(one: Any) -> list[str]:
    memory = one.memory
    lines = [f"too little KV cache: {memory.short}"] if memory.short else []
    if memory.host_bytes:
        lines.append(f"offloaded states need {size(memory.host_bytes)} of host memory on a machine")
    if len(memory.workers) > 1:
        lines.append(f"all loaded at once: {size(memory.sum_bytes)}; one at a time: {size(memory.largest_bytes)}")
    if one.taken:
        lines.append("measures that are taken, what each saves, and what would be without it:")
        lines += [f"  {taken.measure.label}: {size(taken.saved_bytes)}; {_without(taken)}" for taken in one.taken]
    if one.possible:
        lines.append("what else would save memory:")
        lines += [f"  {e.measure.label}: {size(e.saved_bytes)}{_alone(memory, e)}" for e in one.possible]
    if one.least is None:
        lines.append("no combination of three of these measures makes it fit: use more or larger devices")
    elif one.least:
        lines.append(f"least that fits: {' + '.join(_labels(one.least))}")
    return lines


def _without(taken: Any) -> str:
    if taken.fits_without:
        return "would fit"
    instead = " + ".join(_labels(taken.instead))
    return "would NOT fit; instead of it: " + (instead or "no three other measures are enough")


def _alone(memory: Any, effect: Any) -> str:
    """Whether the measure alone is enough, where something is needed."""
    return "" if memory.fits else ", alone enough" if effect.fits else ", not enough alone"


def size(amount: float) -> str:
    """Bytes for a person, in the decimal units of datasheets."""
    for unit, name in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB")):
        if amount >= unit:
            return f"{amount / unit:.1f} {name}"
    return f"{amount / 1e3:.1f} kB"
