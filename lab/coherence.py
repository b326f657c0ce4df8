"""The rules of a scenario that span several keys. Each raises `Incoherent` with the key to change."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from lab import data, drawing, evaluation, experience, offline, publication, scaling
from lab.asynchrony import contradictions
from lab.placement import BYTE_WIDE, Generate, RewardScore, Role, Score, Sharing, Train, Worker
from lab.slices import is_loaded

if TYPE_CHECKING:
    from lab.model import ModelSpec
    from lab.scenario import Scenario


class Incoherent(ValueError):
    """Two keys of a scenario contradict each other; `key` is the dotted path of the one to change."""

    def __init__(self, key: str, problem: str, remedy: str) -> None:
        super().__init__(problem)
        self.key, self.problem, self.remedy = key, problem, remedy


def check(scenario: Scenario) -> None:
    """Raises Incoherent for the first rule that does not hold."""
    for rule in (_models, _pools, _placements, _parallel, _dtypes, _sharing, _batches, _lengths, _blocks, _schedule):
        rule(scenario)
    from lab.judging import check_scoring  # these name what they refuse in the same way
    from lab.targets import check_faults

    check_scoring(scenario)
    check_faults(scenario)


def _models(scenario: Scenario) -> None:
    for role in ("actor", "critic", "reference", "reward"):
        model = getattr(scenario.models, role)
        seen = [role]
        while model is not None and model.like is not None:
            if model.like in seen or getattr(scenario.models, model.like, None) is None:
                problem = f"`like: {model.like}` does not lead to a model with an `arch`"
                raise Incoherent(f"models.{role}.like", problem, "name a role that has an `arch`")
            seen.append(model.like)
            model = getattr(scenario.models, model.like)
    for role in scenario.algorithm.roles:
        place = scenario.place
        if role not in scenario.algorithm.trains and role == "reward" and not _scores_by_model(place.reward_score):
            continue
        if getattr(scenario.models, role) is None:
            problem = f"{scenario.algorithm.name} needs a {role} model"
            other = next((name for name in ("actor", "reward") if name != role and getattr(scenario.models, name)), "")
            shape = f"like: {other}" if other else "arch: qwen2.5-7b"
            raise Incoherent(f"models.{role}", problem, f"add `{role}: {{{shape}}}` under models")
    reward = scenario.models.reward
    if reward is not None and reward.lora is not None and "reward" not in scenario.algorithm.trains:
        problem = f"{scenario.algorithm.name} trains no reward model"
        raise Incoherent("models.reward.lora", problem, "remove it; `algorithm: {name: reward_model}` trains one")


def _pools(scenario: Scenario) -> None:
    for pool, expression in scenario.pools.items():
        try:
            scenario.hardware.select(expression)
        except ValueError as error:
            raise Incoherent(f"pools.{pool}", str(error), "name devices that the cluster has") from None
    owner = Counter(device for devices in scenario.devices.values() for device in devices)
    twice = [device for device, count in owner.items() if count > 1]
    if twice:
        pools = [pool for pool, devices in scenario.devices.items() if twice[0] in devices]
        raise Incoherent(
            f"pools.{pools[-1]}", f"{twice[0]} is also in pool {pools[0]}", "give each pool devices of its own"
        )
    for pool in scenario.sharing:
        if pool not in scenario.pools:
            raise Incoherent(
                f"sharing.{pool}", f"there is no pool {pool!r}", f"the pools are {', '.join(scenario.pools)}"
            )


def _placements(scenario: Scenario) -> None:
    place, algorithm = scenario.place, scenario.algorithm
    needed = {f"{role}.train": getattr(place, f"{role}_train") for role in algorithm.trains}
    frozen = [role for role in algorithm.roles if role not in algorithm.trains]
    needed |= {f"{role}.score": getattr(place, f"{role}_score") for role in frozen}
    if algorithm.rolls_out:
        needed["actor.generate"] = place.actor_generate or None
    for key, given in needed.items():
        if given is None:
            problem = f"{algorithm.name} needs a placement of {key}"
            each = "[{pool: …}]" if key == "actor.generate" else "{pool: …}"
            raise Incoherent(f"place.{key}", problem, f"add `{key}: {each}` under place")
    parts = [(f"place.actor.generate[{i}]", part.pool) for i, part in enumerate(place.actor_generate)]
    parts += [
        (f"place.{key}", part.pool)
        for key, part in (
            ("actor.train", place.actor_train),
            ("critic.train", place.critic_train),
            ("reward.train", place.reward_train),
            ("reference.score", place.reference_score),
            ("reward.score", place.reward_score),
        )
        if part is not None
    ]
    for key, pool in parts:
        if pool not in scenario.pools:
            raise Incoherent(f"{key}.pool", f"there is no pool {pool!r}", f"the pools are {', '.join(scenario.pools)}")


def _parallel(scenario: Scenario) -> None:
    """What is cut into equal parts must divide."""
    place = scenario.place
    parts: list[tuple[str, Role, Generate | Train | Score]] = []
    if scenario.algorithm.rolls_out:
        parts += [(f"actor.generate[{i}]", "actor", part) for i, part in enumerate(place.actor_generate)]
    parts += [(f"{role}.train", role, train) for role, train in scenario.trained.items()]
    parts += [(f"{role}.score", role, score) for role, score in scenario.scored.items() if _is_model(score)]
    for key, role, part in parts:
        for name, problem, remedy in _indivisible(scenario.spec(role), part):
            raise Incoherent(f"place.{key}.{name}", problem, remedy)


def _indivisible(spec: ModelSpec, part: Generate | Train | Score) -> Iterator[tuple[str, str, str]]:
    """Keys of a placement that do not divide what they cut, with problem and remedy."""
    spread = part.parallelism
    if spec.heads % spread.tensor:
        yield "tensor_parallel", f"{spread.tensor} does not divide the {spec.heads} heads", "use a divisor"
    if spec.layers % spread.pipeline:
        yield "pipeline_parallel", f"{spread.pipeline} does not divide the {spec.layers} layers", "use a divisor"
    if spread.data > 1 and spec.moe is None:
        yield "data_parallel", "copies inside one engine share experts, and the model has none", "use more `engines`"
    if isinstance(part, Train) and part.zero_stage >= 2 and spread.pipeline > 1:
        yield "zero_stage", "gradients cannot be sharded while a pipeline still adds to them", "set it to 0 or 1"
    if spread.expert == 1:
        return
    ranks = part.data_parallel * spread.context if isinstance(part, Train) else spread.tensor * spread.data
    if spec.moe is None:
        yield "expert_parallel", "the model has no experts", "set it to 1"
    elif ranks % spread.expert:
        yield (
            "expert_parallel",
            f"{spread.expert} does not divide the {ranks} ranks that may share experts",
            "use a divisor",
        )
    elif spec.moe.num_experts % spread.expert:
        yield "expert_parallel", f"{spread.expert} does not divide {spec.moe.num_experts} experts", "use a divisor"


def _dtypes(scenario: Scenario) -> None:
    """What is trained has at least 16 bits, and a GPU computes what it has units for."""
    for role in scenario.trained:
        model = scenario.model(role)
        if model.dtype in BYTE_WIDE and model.lora is None:
            remedy = (
                "set it to bfloat16, float16 or float32, or add `lora: {rank: 16}`; an engine may have its own dtype"
            )
            raise Incoherent(f"models.{role}.dtype", f"weights of {model.dtype} cannot be trained", remedy)
    for worker in scenario.workers.values():
        kind, node = scenario.device_of(worker.pool), scenario.hardware.node_of(worker.devices[0])
        if kind.kind != "gpu" or "bfloat16" in kind.flops or not _claims(scenario, worker):
            continue
        for name, dtype in (("dtype", worker.dtype), ("kv_dtype", worker.kv_dtype)):
            if dtype == "bfloat16":
                key = _dtype_key(scenario, worker, name)
                raise Incoherent(key, f"{node.device} has no bfloat16 ({worker.name})", "set it to float16")


def _dtype_key(scenario: Scenario, worker: Worker, name: str) -> str:
    """The key that a worker's dtype stands at: of its placement where it is said there, else of the model."""
    parts: dict[str, Generate | Score | None] = {}
    if worker.work == "generate":
        index = int(worker.name.split("[")[1].rstrip("]"))
        for i, part in enumerate(scenario.place.actor_generate):
            if 0 <= index < part.engines:
                parts[f"place.actor.generate[{i}]"] = part
            index -= part.engines
    elif worker.work == "score":
        key = f"place.{worker.role}.score"
        parts[key] = scenario.scored.get(worker.role)
    said = [key for key, part in parts.items() if name == "kv_dtype" or getattr(part, name, None) is not None]
    return f"{said[0]}.{name}" if said else f"models.{worker.role}.dtype"


def _sharing(scenario: Scenario) -> None:
    for pool, devices in scenario.devices.items():
        sharing = scenario.sharing.get(pool)
        _ranks_fit(scenario, pool)
        workers = [worker for worker in scenario.workers.values() if worker.pool == pool and _claims(scenario, worker)]
        if sharing is not None and sharing.how != "exclusive":
            for together in _loaded_together(sharing, workers):
                _contending(scenario, pool, together)
            if sharing.how == "time_sliced":
                _slices(scenario, pool, sharing)
            continue
        demand = sum(len(worker.devices) for worker in workers)
        if demand > len(devices):
            names = ", ".join(worker.name for worker in workers)
            problem = f"{names} need {demand} devices of their own, the pool has {len(devices)}"
            raise Incoherent(
                f"pools.{pool}", problem, f"enlarge the pool, or set `sharing: {{{pool}: {{how: resident}}}}`"
            )


def _loaded_together(sharing: Sharing, workers: list[Worker]) -> list[list[Worker]]:
    """The workers of each slice; all of them where none gives way."""
    slices = [(sharing.slice_of(f"{worker.role}.{worker.work}"), worker) for worker in workers]
    return [[worker for name, worker in slices if name == slice] for slice in dict.fromkeys(name for name, _ in slices)]


def _contending(scenario: Scenario, pool: str, workers: list[Worker]) -> None:
    wide = [worker for worker in workers if len(set(worker.devices)) < len(worker.devices)]
    if wide:
        problem = f"{wide[0].name} needs {len(wide[0].devices)} devices, pool {pool} has {len(scenario.devices[pool])}"
        raise Incoherent(f"pools.{pool}", problem, "use a larger pool or less tensor parallelism")
    if scenario.device_of(pool).kind == "gpu":
        _same_or_apart(pool, [(worker.name, set(worker.devices)) for worker in workers])


def _slices(scenario: Scenario, pool: str, sharing: Sharing) -> None:
    """Works that take turns are all named, and what one leaves is there when it comes again."""
    key = f"sharing.{pool}"
    placed = dict.fromkeys(
        f"{worker.role}.{worker.work}"
        for worker in scenario.workers.values()
        if worker.pool == pool and is_loaded(scenario, worker)
    )
    for work in placed:
        if not sharing.slice_of(work):
            raise Incoherent(f"{key}.slices", f"{work} is on this pool and in no slice", "add it to one")
    for work in [work for together in sharing.slices or () for work in together]:
        if work not in placed:
            raise Incoherent(f"{key}.slices", f"no model is placed on this pool as {work}", "remove it")
    if len({sharing.slice_of(work) for work in placed}) == 1:
        raise Incoherent(f"{key}.how", "all works of this pool are in one slice", "set it to resident")
    scored = [work for work in placed if work.endswith(".score")]
    if scored and scenario.schedule.scoring == "sample" and scenario.schedule.mode == "asynchronous":
        problem = f"{scored[0]} takes turns on pool {pool}, and samples come to it at all times"
        raise Incoherent("schedule.scoring", problem, "set it to batch, or give it devices of its own")
    generated = "actor.generate" in placed
    if sharing.switch == "sleep" and sharing.slice_of("actor.generate") != "actor.generate":
        problem = "only engines can sleep, and none has a slice of its own here"
        raise Incoherent(f"{key}.switch", problem, "set it to offload or reload, or give actor.generate its own slice")
    if generated and scenario.schedule.mode != "synchronous":
        problem = f"engines that take turns with other works cannot run beside them, as {scenario.schedule.mode} asks"
        raise Incoherent("schedule.mode", problem, f"set it to synchronous, or give the engines a pool beside {pool}")
    if generated and sharing.switch == "reload" and scenario.model("actor").lora is None:
        problem = "an engine that starts from storage has the old weights"
        raise Incoherent(f"{key}.switch", problem, "set it to offload or sleep, or train adapters: `lora: {rank: 16}`")


def _claims(scenario: Scenario, worker: Worker) -> bool:
    """Whether a worker needs devices of its own; only a reward function may not."""
    return worker.work != "score" or scenario.claims_devices(scenario.scored[worker.role])


def _scores_by_model(score: Score | None) -> bool:
    """Whether a reward that is placed needs a model; one that is not placed is asked for by its place."""
    return score is not None and _is_model(score)


def _is_model(score: Score) -> bool:
    return not isinstance(score, RewardScore) or score.kind == "model"


def _ranks_fit(scenario: Scenario, pool: str) -> None:
    """Two ranks of one NCCL group cannot be on one GPU, even where the pool's workers contend for its devices."""
    num_devices, sharing = len(scenario.devices[pool]), scenario.sharing.get(pool)
    if scenario.device_of(pool).kind != "gpu" or sharing is None or sharing.how == "exclusive":
        return
    for role in scenario.trained:
        team = [worker for worker in scenario.team(role, "train") if worker.pool == pool]
        wanted = sum(len(worker.devices) for worker in team)
        if len(team) > 1 and wanted > num_devices:
            each = len(team[0].devices)
            problem = f"{len(team)} ranks of one group need {wanted} GPUs, pool {pool} has {num_devices}"
            fits = (
                f"set it to {num_devices // each}, or enlarge the pool" if num_devices >= each else "enlarge the pool"
            )
            raise Incoherent(f"place.{role}.train.data_parallel", problem, fits)


def _same_or_apart(pool: str, groups: list[tuple[str, set[str]]]) -> None:
    """Groups that share only some of their devices would wait for each other in ways that are not modelled."""
    for i, (first, ours) in enumerate(groups):
        for second, theirs in groups[:i]:
            if ours & theirs and ours != theirs:
                problem = f"{second} and {first} share only some of their devices"
                raise Incoherent(f"pools.{pool}", problem, "choose a size that puts them on the same devices or apart")


def _batches(scenario: Scenario) -> None:
    if scenario.algorithm.name == "grpo" and scenario.workload.samples_per_prompt < 2:
        problem = "grpo compares the samples of one prompt and needs at least two"
        raise Incoherent("workload.samples_per_prompt", problem, "set it to 2 or more")
    if scenario.algorithm.together == 2 and scenario.workload.samples_per_prompt % 2:
        problem = f"{scenario.algorithm.name} learns from pairs of responses to one prompt"
        raise Incoherent("workload.samples_per_prompt", problem, "set it to 2: a chosen and a rejected response")
    samples, update, each = scenario.workload.samples_per_step, scenario.update, scenario.workload.samples_per_prompt
    if scenario.algorithm.extra_forwards and update.minibatch_samples <= each:
        problem = f"a mini-batch of {update.minibatch_samples} samples is of one prompt, no other lends a response"
        raise Incoherent("update.minibatch_samples", problem, f"set it to {2 * each} or more, or `kl: none`")
    if samples % update.minibatch_samples:
        problem = f"{update.minibatch_samples} samples do not divide the {samples} samples of a step"
        raise Incoherent("update.minibatch_samples", problem, "use a divisor of prompts_per_step × samples_per_prompt")
    together = scenario.algorithm.together
    if update.minibatch_samples % together:
        problem = f"{scenario.algorithm.name} learns from pairs, which {update.minibatch_samples} samples tear apart"
        raise Incoherent("update.minibatch_samples", problem, f"set it to a multiple of {together}")
    for role, part in scenario.trained.items():
        if update.minibatch_samples % (part.data_parallel * together):
            what = f"{update.minibatch_samples} samples" if together == 1 else f"{update.minibatch_samples // 2} pairs"
            problem = f"{part.data_parallel} ranks do not divide a mini-batch of {what}"
            remedy = "use a divisor of update.minibatch_samples"
            remedy += "" if together == 1 else f" / {together}: the {together} samples of a pair stay together"
            raise Incoherent(f"place.{role}.train.data_parallel", problem, remedy)


def _lengths(scenario: Scenario) -> None:
    together, update = scenario.algorithm.together, scenario.update
    longest = scenario.workload.max_sequence_tokens * together
    if longest > (update.microbatch_tokens or longest):
        what = "the longest sequence" if together == 1 else "the longest pair of sequences"
        problem = f"{what} ({longest} tokens) does not fit a micro-batch"
        remedy = f"set it to {longest} or more"
        if scenario.data.source is not None:
            remedy += ", or leave longer lines out with `data.max_tokens` and `data.on_broken: skip`"
        raise Incoherent("update.microbatch_tokens", problem, remedy)
    if update.microbatch_samples is not None and update.microbatch_samples < together:
        problem = f"{scenario.algorithm.name} learns from pairs, which one pass must hold"
        raise Incoherent("update.microbatch_samples", problem, f"set it to {together} or more")


RULES = (
    offline.contradictions, contradictions, publication.contradictions, experience.contradictions, drawing.contradictions,
    evaluation.contradictions, scaling.contradictions, data.contradictions,
)  # fmt: skip
"""rules that stand with what they are about"""


def _schedule(scenario: Scenario) -> None:
    for contradiction in RULES:
        for key, problem, remedy in contradiction(scenario):
            raise Incoherent(key, problem, remedy)


GPU_BLOCK_MULTIPLE = 16
"""vLLM's attention backends on GPUs take blocks of multiples of 16 tokens (`get_supported_kernel_block_sizes`)"""
SMALLEST_ROOM = 32
"""tokens; a block of this size is refused nowhere, however short the sequences are"""


def _blocks(scenario: Scenario) -> None:
    size, longest = scenario.rollout.block_tokens, scenario.workload.max_sequence_tokens
    if not scenario.algorithm.rolls_out:
        return
    gpu = any(scenario.device_of(part.pool).kind == "gpu" for part in scenario.place.actor_generate)
    if gpu and size % GPU_BLOCK_MULTIPLE:
        problem = f"{size} is not a multiple of {GPU_BLOCK_MULTIPLE}, which vLLM needs on a GPU"
        multiple = -(-size // GPU_BLOCK_MULTIPLE) * GPU_BLOCK_MULTIPLE
        raise Incoherent("rollout.block_tokens", problem, f"set it to {multiple}")
    room = max(SMALLEST_ROOM, 2 ** (longest - 1).bit_length())
    if size > room:
        problem = f"a block of {size} tokens is never full: the longest sequence has {longest}"
        raise Incoherent("rollout.block_tokens", problem, f"set it to {room} or less")
