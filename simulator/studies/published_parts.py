"""The parts of one published step: what is simulated of it, and closed forms for what is not placed there.

rollout       simulated on all engines; where there is none, every rank generates batches in lock-step
log-probs     forward passes of one rank, over the samples it is dealt, and the pipeline's bubble
update        simulated on the trainer, and on the critic's
weight sync   simulated, and what gathers sharded weights before it
switch        devices used in turn: the engine asleep and awake, the trainer's states to the host and back
step          their sum; with overlap the longer of the rollout and of everything else
"""

from __future__ import annotations

from dataclasses import dataclass

from lab.measurement import pass_quantities
from lab.model import DTYPE_BYTES
from lab.policies.microbatch import deal, pack
from lab.scenario import Scenario
from lab.timeline import Timeline
from profiles.cost import CostModel
from profiles.memory import ADAM_STATE_BYTES
from profiles.moves import SYNC_TENSOR_S, host_copy_seconds, num_tensors
from profiles.profile import Profile, datasheet, find
from profiles.roofline import LAYER_PASS_S
from simulator.run import simulate
from simulator.studies.published_scenario import Run, scenario_lengths, serving, spec_of, training

FRAMEWORK_ROLLOUT = 1.25
"""time of a rollout inside a training framework over that of its engines alone: requests and outputs through Ray, log-probs
of sampled tokens, prompts dealt unevenly. Fitted to the even half of the published cases (4 runs of NeMo RL bound by their
rollout, 1.16 to 1.33, 30 November 2026)"""
EAGER_LAYER_S = 4.0e-4
"""host time of a layer of an engine's iteration without CUDA graphs: fitted to the even half (2 logs of verl with vLLM
0.8.3, 30 November 2026)"""
REWARD_S, REWARD_WORKERS = 0.02, 8
"""of one answer checked by rule (parsing and comparing formulas; order of math-verify), by so many processes (NeMo RL's
default)"""


@dataclass(frozen=True, kw_only=True)
class Parts:
    """Seconds of the parts of one step."""

    rollout: float
    experience: float
    """log-probs, values and scores"""
    update: float
    weight_sync: float
    switch: float
    overlapped: bool

    @property
    def step(self) -> float:
        rest = self.experience + self.update + self.weight_sync + self.switch
        return max(self.rollout, rest) if self.overlapped else self.rollout + rest


def parts(run: Run) -> Parts:
    """Predicts a run. Raises pydantic's ValidationError or InputError where it makes no scenario."""
    profiles = profiles_of(run.device)
    served = simulate(serving(run), profiles) if run.engines else None
    trained = simulate(trainer := training(run), profiles)
    costs = CostModel(trainer, profiles)
    actor = scoring_seconds(trainer, costs, run.score_tokens)
    values = update_critic = 0.0
    if run.critic_trainer is not None:
        critic = training(run, "critic")
        values = scoring_seconds(critic, CostModel(critic, profiles), run.critic_tokens, "critic")
        update_critic = stage_seconds(simulate(critic, profiles), "update_critic")
    update_actor, together = stage_seconds(trained, "update_actor"), max if run.critic_apart else _sum
    sync = (
        _reshard_seconds(trained)
        + exporting_seconds(trainer, costs)
        + (stage_seconds(served, "weight_sync") if served else 0.0)
    )
    return Parts(
        rollout=rollout_seconds(run, served) if served else generating_seconds(run, trainer, costs),
        experience=together(run.scored * actor, values, actor if run.scorers else 0.0) + reward_seconds(run),
        update=together(update_actor, update_critic),
        weight_sync=sync,
        switch=0.0 if run.overlapped or run.critic_apart or not run.engines else switch_seconds(run),
        overlapped=run.overlapped,
    )


def reward_seconds(run: Run) -> float:
    """Answers checked by rule; with a reward model (OpenRLHF's comparison) none are, and overlapped ones are checked as they
    come."""
    return 0.0 if run.overlapped or run.critic_apart else run.prompts * run.samples * REWARD_S / REWARD_WORKERS


def _sum(*seconds: float) -> float:
    return sum(seconds)


def profiles_of(device: str) -> dict[str, Profile]:
    """The library's profile of a device, never one of this machine."""
    found = find(device)
    return {device: found if found.device == device else datasheet(device)}


def stage_seconds(timeline: Timeline, stage: str) -> float:
    """From the first start to the last end of a stage of the one step."""
    spans = [span for span in timeline.spans if span.stage == stage and not span.op]
    return max(span.end_s for span in spans) - min(span.start_s for span in spans)


def rollout_seconds(run: Run, timeline: Timeline) -> float:
    """The rollout, and what launching every layer of every iteration from the host adds."""
    iterations = [
        span.attrs["iterations"] for span in timeline.spans if span.stage == "rollout" and "iterations" in span.attrs
        and not span.op
    ]  # fmt: skip
    launches = EAGER_LAYER_S * spec_of(run).layers * float(max(iterations))
    return FRAMEWORK_ROLLOUT * stage_seconds(timeline, "rollout") + (launches if run.eager else 0.0)


def scoring_seconds(scenario: Scenario, costs: CostModel, tokens: int, role: str = "actor") -> float:
    """Forward passes of `tokens` tokens over the samples of a role's first rank."""
    team = scenario.team(role, "train")
    all_lengths = scenario_lengths(scenario)
    lengths = [all_lengths[i] for i in deal(len(all_lengths), len(team))[0]]
    spec, stage = scenario.spec(role), scenario.train(role).zero_stage
    groups = pack(lengths, tokens)
    passes = [pass_quantities(spec, role, len(group), lengths[group[0]], stage) for group in groups]
    busy = sum(costs.op(team[0], "logprob", quantities).seconds for quantities in passes)
    return busy * (1 + (team[0].parallelism.pipeline - 1) / len(groups))


def generating_seconds(run: Run, scenario: Scenario, costs: CostModel) -> float:
    """Ranks of a trainer that generate: batch after batch, token after token, every layer launched from the host.

    A token takes the launches of a forward pass, or its weights' way from memory where that is longer; where weights
    are sharded they are gathered for every token (Yao et al. 2023, DeepSpeed-Chat's hybrid engine, does without).
    """
    team = scenario.team("actor", "train")
    worker, layers = team[0], spec_of(run).layers
    quantities = pass_quantities(spec_of(run), "actor", run.generate_batch, 1, scenario.train("actor").zero_stage)
    token = costs.op(worker, "logprob", quantities).seconds
    batches = -(-run.prompts * run.samples // len(team) // run.generate_batch)
    return batches * run.longest * max(token, layers * LAYER_PASS_S["gpu"])


def switch_seconds(run: Run) -> float:
    """A step's two changes of hands: weights of the engine and states of the trainer, to the host and back."""
    spec = spec_of(run)
    weights = spec.parameters * DTYPE_BYTES[run.engine_dtype or "bfloat16"] / (run.tensor * run.pipeline)
    states = spec.parameters * (DTYPE_BYTES["bfloat16"] + ADAM_STATE_BYTES) / run.width
    return 2 * (host_copy_seconds(weights) + host_copy_seconds(states))


def exporting_seconds(scenario: Scenario, costs: CostModel) -> float:
    """Latencies of gathering weights tensor by tensor, once for each way in which the trainer has cut them."""
    worker = scenario.team("actor", "train")[0]
    spread = worker.parallelism
    cuts = (spread.tensor > 1) + (spread.pipeline > 1) + (spread.expert > 1)
    return cuts * SYNC_TENSOR_S["gpu"] * num_tensors(costs.layout(worker))


def _reshard_seconds(timeline: Timeline) -> float:
    spans = [span for span in timeline.spans if span.op == "reshard"]
    return max((span.end_s - span.start_s for span in spans), default=0.0)
