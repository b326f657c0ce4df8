"""The rules of a scenario about what scores its samples. Each raises `Incoherent` with the key to change."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lab.coherence import Incoherent

if TYPE_CHECKING:
    from lab.placement import Score
    from lab.scenario import Scenario


TRAINERS = {"value": "critic", "old_logprob": "actor"}
"""by stage that scores samples on a trainer: the role"""


def one_by_one(scenario: Scenario, stage: str) -> bool:
    """Whether a stage scores each sample as soon as it is generated, with a barrier after the last of them.

    A trainer does where every rank can make a pass alone: without ZeRO 3, without a pipeline, and on a pool that takes
    no turns. Without a barrier the scores are in time as they come, and the trainer takes whole batches. So it does on
    cores, where a run is the same to the bit whenever its samples come.
    """
    if scenario.schedule.scoring == "batch" or scenario.schedule.mode == "asynchronous":
        return False
    if stage not in TRAINERS:
        return stage in ("reward", "reference")
    train = scenario.train(TRAINERS[stage])
    sharing = scenario.sharing.get(train.pool)
    sliced = sharing is not None and sharing.how == "time_sliced"
    alone = train.zero_stage < 3 and train.pipeline_parallel == 1
    return alone and not sliced and scenario.device_of(train.pool).kind == "gpu"


def check_scoring(scenario: Scenario) -> None:
    """Raises Incoherent for the first rule that does not hold."""
    for rule in (_head, _trunk, _waiting, _beside):
        rule(scenario)


def _head(scenario: Scenario) -> None:
    """A head is where its trunk is, in as many copies."""
    head, trunk = scenario.place.reward_score, scenario.scored.get("reference")
    if head is None or not head.shares_trunk or "reward" not in scenario.scored:
        return
    if trunk is None:
        problem = "there is no reference whose trunk the reward could share"
        raise Incoherent("place.reward.score.shares_trunk", problem, "set algorithm.kl_coef above 0, or remove it")
    for name in ("pool", "tensor_parallel", "replicas"):
        wanted = getattr(trunk, name)
        if getattr(head, name) != wanted:
            problem = f"the reward shares the reference's trunk, which has {name} {wanted}"
            raise Incoherent(f"place.reward.score.{name}", problem, f"set it to {wanted}")


def _trunk(scenario: Scenario) -> None:
    """One network with two heads has one shape and one dtype."""
    if not scenario.place.reward_head or "reward" not in scenario.scored:
        return
    if scenario.spec("reward") != scenario.spec("reference"):
        problem = "the reward shares the reference's trunk, and is of another architecture"
        raise Incoherent("models.reward", problem, "set it to {like: reference}")
    head, trunk = (scenario.team(role, "score")[0].dtype for role in ("reward", "reference"))
    if head != trunk:
        key = "place.reward.score.dtype" if scenario.scored["reward"].dtype else "models.reward.dtype"
        problem = f"the reward shares the reference's trunk, whose weights are {trunk}"
        raise Incoherent(key, problem, f"set it to {trunk}")


def _waiting(scenario: Scenario) -> None:
    for role, part in scenario.scored.items():
        if part.max_wait and scenario.schedule.scoring == "batch":
            problem = "all samples of a step come together: no batch waits for more"
            raise Incoherent(f"place.{role}.score.max_wait", problem, "set schedule.scoring to sample, or remove it")


def _beside(scenario: Scenario) -> None:
    """What scores while engines generate is loaded together with them."""
    if scenario.schedule.scoring == "batch" or not scenario.algorithm.rolls_out:
        return
    for pool, sharing in scenario.sharing.items():
        apart = [role for role, part in scenario.scored.items() if part.pool == pool and _is_loaded(part)]
        engines = any(part.pool == pool for part in scenario.place.actor_generate)
        for role in apart if engines and sharing.how == "time_sliced" else ():
            if sharing.slice_of(f"{role}.score") != sharing.slice_of("actor.generate"):
                problem = f"the {role} takes turns with the engines on pool {pool}, and cannot score beside them"
                raise Incoherent("schedule.scoring", problem, "set it to batch, or use another pool")


def _is_loaded(part: Score) -> bool:
    return getattr(part, "kind", "model") == "model"
