"""How a run comes back after a fault: what is lost, what is read again, and from which step it goes on."""

from __future__ import annotations

from lab.model import DTYPE_BYTES
from lab.placement import Worker
from simulator.checkpoints import state_bytes, trained
from simulator.launching import everybody
from simulator.network import Flow, Flows
from simulator.transfers import networked
from simulator.world import Process, World


def settled(world: World) -> Process:
    """Ends when no weights are being changed or saved."""
    while busy := world.under_way("update_actor", "update_critic", "checkpoint"):
        yield world.env.all_of([world.finished(*run) for run in busy])


def last_update(world: World, deadline: float) -> Process:
    """Ends when no weights are being changed and another update would not be complete and saved by the deadline.

    The next update is expected after as long as the last one took.
    """
    write_s = max(
        world.cost(worker, "checkpoint", {"calls": 1.0, "bytes": state_bytes(world, worker) / len(team)}).seconds
        for team in trained(world.scenario)
        for worker in team
    )
    stages = [stage for stage in ("update_actor", "update_critic") if stage in world.dataflow.nodes]
    while True:
        yield from settled(world)
        done = world.updated()
        behind = world.progress_at(done)
        step_s = behind - world.progress_at(done - 1) if done > world.first_step else behind / max(done + 1, 1)
        due = world.now - (world.progress() - behind) + step_s
        if done + 1 == world.dataflow.num_steps or (done >= 0 and max(due, world.now) + write_s > deadline):
            return
        yield world.env.all_of([world.finished(stage, done + 1) for stage in stages])


def from_checkpoint(world: World) -> None:
    """The run goes back to its last complete checkpoint, or to its beginning; everything since then is lost."""
    saved = world.store.last()
    _go_back(world, 0 if saved is None else saved.step + 1, 0.0 if saved is None else saved.progress_s)


def keep_state(world: World) -> None:
    """Stages under way are given up; the trained state is that of the last complete update."""
    _go_back(world, world.updated() + 1, world.progress_at(world.updated()))


def regenerate(world: World) -> None:
    """Samples that were not trained yet are generated again."""
    keep_state(world)


def nothing(world: World) -> Process:
    """Stages run again at once."""
    yield world.env.timeout(0.0)


def _go_back(world: World, first_step: int, progress_s: float) -> None:
    before, tokens = world.progress(), world.ledger.lost_tokens()
    record = world.struck
    record |= {"from_s": world.reached_at(progress_s), "until_s": world.now}
    world.store.discard(first_step)
    world.go_back(first_step, progress_s)
    record["lost_s"] += before - progress_s
    record["lost_tokens"] += world.ledger.lost_tokens() - tokens
    record["step"] = first_step


def last_write(world: World) -> Process:
    """The state in the trainers' memory goes to storage."""
    teams, step = trained(world.scenario), world.first_step - 1
    saved = world.store.last()
    if step < 0 or (saved is not None and saved.step == step):
        return
    world.store.begin(step, sum(map(len, teams)), world.progress_at(step))
    parts = [
        world.env.process(_move(world, w, state_bytes(world, w) / len(team), "checkpoint"))
        for team in teams
        for w in team
    ]
    yield world.env.all_of(parts)
    for team in teams:
        for worker in team:
            world.store.write(step, state_bytes(world, worker) / len(team))


def come_back(world: World, away_s: float, start_s: float | None, begun: float) -> Process:
    """After `away_s` everybody starts, and reads the state again: trainers all of it, engines the weights.

    `start_s`: what a start takes, if it is stated; `begun`: since when nobody works.
    """
    scenario, reads = world.scenario, list[tuple[Worker, float]]()
    for team in trained(scenario):
        reads += [(worker, state_bytes(world, worker) / len(team)) for worker in team]
    for worker in scenario.team("actor", "generate"):
        reads.append((worker, scenario.spec("actor").parameters * DTYPE_BYTES[worker.dtype]))
    world.absent.update({worker.name: begun for worker, _ in reads})
    yield world.env.timeout(away_s)
    yield from everybody(world, start_s)
    yield world.env.all_of([world.env.process(_read(world, worker, size, begun)) for worker, size in reads])


def _read(world: World, worker: Worker, size: float, begun: float) -> Process:
    start = world.now
    yield from _move(world, worker, size, "checkpoint_read")
    del world.absent[worker.name]
    world.restored(worker.name, begun, world.now - start, size)


def _move(world: World, worker: Worker, size: float, op: str) -> Process:
    """So many bytes to storage or back."""
    if networked(world, worker, op):
        topology, part = world.network.topology, size / len(worker.devices)
        way = topology.to_storage if op == "checkpoint" else topology.from_storage
        yield from world.network.send_all(Flows.of(Flow(path=way(device), bytes=part) for device in worker.devices))
    else:
        yield from world.cores(worker).work(worker, op, world.cost(worker, op, {"calls": 1.0, "bytes": size}).seconds)
