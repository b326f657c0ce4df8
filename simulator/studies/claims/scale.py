"""Claims about very large numbers: tokens a day, rollouts of an iteration, checkpoints of many runs."""

from __future__ import annotations

from collections.abc import Callable

from lab.library import tiers
from simulator.studies.claims import Bench, Judgement, size
from simulator.studies.claims.rollout import generated, token_rate

DAY = 86400.0
ENGINES = 8
"""of grpo-7b-16gpu, one on each GPU"""


def tokens_a_day(bench: Bench) -> Judgement:
    """Ten million prompts a day with two candidates of 500 tokens: tokens a second, and GPUs."""
    rate = 10e6 * 2 * 500 / DAY
    said = {
        "workload/samples_per_prompt": 2,
        "workload/response_tokens": {"dist": "lognormal", "mean": 500, "p95": 1400, "max": 4000},
    }
    played = generated(bench, 1024, said | {"update/minibatch_samples": 512, "rollout/max_num_seqs": 256})
    each = token_rate(played) / ENGINES
    prompts = played.summary["tokens"]["prompt"] / played.summary["tokens"]["response"]
    return Judgement(
        value=f"{rate / 1e3:.1f} K tokens/s; at {each:,.0f} tokens/s a GPU that is {rate / each:.0f} A100 for a 7B model",
        verdict="holds" if abs(rate / 116e3 - 1) < 0.01 else "does not hold",
        numbers={"tokens_per_s": rate, "per_gpu": each, "gpus": rate / each, "prompt_share": prompts},
        reason="The arithmetic is right. For a 7B model with full batches it is a few machines, not a platform of its own; for "
        "a 70B model, or with tails and peaks, ten times as many.",
    )  # fmt: skip


def million_prompts(bench: Bench) -> Judgement:
    """A million prompts of 1,000 tokens in an iteration on 512 engines: a sixty-fourth of it on eight, prompt by prompt."""
    said = {
        "workload/samples_per_prompt": 2, "workload/response_tokens": {"dist": "lognormal", "mean": 1000, "p95": 2600, "max": 4096},
        "update/minibatch_samples": 512, "rollout/max_num_seqs": 256, "num_steps": 1, "update/microbatch_tokens": 16384,
    }  # fmt: skip
    played = bench.play("grpo-7b-16gpu", said | {"workload/prompts_per_step": 7936})
    tokens = played.summary["tokens"]["response"] * 1e6 / 15872
    rollout, update = played.busy_s("rollout"), played.busy_s("update_actor")
    return Judgement(
        value=f"{tokens / 1e9:.2f} billion tokens; on 512 A100 {rollout / 60:.0f} min of generation, on as many {update / 60:.0f} "
        "min of training for each epoch",
        verdict="holds" if abs(tokens / 1e9 - 1) < 0.05 else "does not hold",
        numbers={"tokens": tokens, "rollout_s": rollout, "update_s": update},
        reason="The count is right. More epochs leave it as it is and add training time, which with 7B already exceeds "
        "generation in the first epoch.",
    )  # fmt: skip


def hundred_runs(bench: Bench) -> Judgement:
    """A checkpoint of hundreds of GB every thirty minutes from each of 100 runs."""
    each = 14.0 * bench.scenario("ppo-7b-16gpu", {"models/actor/arch": "qwen2.5-32b"}).spec("actor").parameters
    rate = 100 * each / 1800
    totals = {name: (one.total or one.write) for name, one in tiers().items()}
    enough = [name for name, total in totals.items() if total > rate]
    return Judgement(
        value=f"{size(each)} a checkpoint of a 32B model with Adam's states; {size(rate)}/s day and night, {size(48 * 100 * each)} "
        f"a day; a shared Lustre writes {size(totals['lustre'])}/s, an NFS server {size(totals['nfs'])}/s",
        verdict="holds" if rate > totals["nfs"] else "does not hold",
        numbers={"bytes": each, "bytes_per_s": rate, "bytes_per_day": 48 * 100 * each, "enough": float(len(enough))},
        reason="It takes a third of a large parallel file system, more than twenty NFS servers, and fills petabytes in a day: "
        "without a rule for what is deleted no storage lasts a week.",
    )  # fmt: skip


JUDGES: dict[str, Callable[[Bench], Judgement]] = {
    "tokens-a-day": tokens_a_day,
    "million-prompts": million_prompts,
    "hundred-runs": hundred_runs,
}
