"""What is watched of a run while it goes on: one list of metrics, of which exporter, dashboard and alert rules are made.

A metric is exposed as one series for each value of its own labels; `iteration` and `model_version` say of which step and
of which weights the present value is, and change with it, so that nothing piles up in the exporter. Queries therefore
begin with `now(metric)`, which lets those two labels go.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

LABELS = ("experiment_id", "iteration", "model_version")
"""on every metric and on every log line: the run's folder, the step, the version of the actor's weights"""
PREFIX = "lab_"

Kind = Literal["gauge", "counter", "histogram"]


@dataclass(frozen=True, kw_only=True)
class Metric:
    """One thing that is watched."""

    name: str
    """as Prometheus has it, without the prefix; counters end in _total"""
    kind: Kind = "gauge"
    help: str
    labels: tuple[str, ...] = ()
    """of its own"""
    learned: tuple[tuple[str, str], ...] = ()
    """(value of its own label, or "", key of a learning row) of what is read from there"""
    edges: tuple[float, ...] = ()
    """of a histogram: upper ends of the buckets, the last one infinity left out"""

    @property
    def full_name(self) -> str:
        return PREFIX + self.name


def _learned(name: str, key: str, text: str) -> Metric:
    return Metric(name=name, help=text, learned=(("", key),))


_REWARDS = tuple(round(0.1 * i - 2.0, 1) for i in range(41))
_HALF = (0.1, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0)
_SIGNED = (*(-edge for edge in _HALF[::-1]), 0.0, *_HALF)
_KL = (-1.0, -0.5, -0.1, 0.0, 0.01, 0.03, 0.1, 0.2, 0.3, 0.5, 1.0, 1.5, 2.0, 3.0, 5.0, 7.5, 10.0, 15.0)
_TOKENS = tuple(float(2**i) for i in range(18))

METRICS = (
    _learned("reward", "reward", "mean reward of the samples of a step"),
    _learned("kl", "kl", "mean KL of the policy to the reference per token, nats"),
    _learned("entropy", "sampled_entropy", "mean of -log p of sampled tokens, nats"),
    _learned("loss", "loss", "loss of the actor, or of the only model that is trained"),
    _learned("critic_loss", "value_loss", "loss of the critic"),
    _learned("clip_fraction", "clip_fraction", "share of tokens whose ratio was clipped"),
    _learned("effective_sample_ratio", "effective_sample_size", "effective sample size as a share of the samples"),
    _learned("gradient_norm", "grad_norm", "norm of the gradient before clipping, mean over optimizer steps"),
    _learned("learning_rate", "learning_rate", "of the last optimizer step"),
    _learned("temperature", "temperature", "that samples are drawn at"),
    _learned("logprob_gap", "logprob_gap", "largest gap between the engine's log-probs and the trainer's"),
    _learned("evaluation_reward", "evaluation_reward", "mean reward of the latest evaluation"),
    Metric(
        name="distinct_ratio", labels=("n",), learned=(("1", "distinct_1"), ("2", "distinct_2")),
        help="different n-grams of a prompt's answers as a share of all of them",
    ),
    Metric(name="reward_distribution", kind="histogram", edges=_REWARDS, help="rewards of the step's samples"),
    Metric(
        name="advantage_distribution", kind="histogram", edges=_SIGNED, help="mean advantage of each of the step's samples"
    ),
    Metric(
        name="kl_distribution", kind="histogram", edges=_KL,
        help="log p - log p_reference of each of the step's samples, mean over its response, nats",
    ),
    Metric(
        name="response_tokens", kind="histogram", edges=_TOKENS, help="tokens of the responses of the step's samples"
    ),
    Metric(name="response_length_tokens", help="mean tokens of a response of the step"),
    Metric(name="generated_tokens_total", kind="counter", help="response tokens that the engines have made"),
    Metric(name="generated_tokens_per_second", help="response tokens per second of the latest rollout"),
    Metric(name="samples_total", kind="counter", labels=("fate",), help="samples generated, trained, dropped or lost"),
    Metric(name="samples_per_second", help="samples trained per second of the latest step"),
    Metric(name="buffer_samples", help="samples that wait for their update: generated, not yet trained"),
    Metric(name="lag_versions", labels=("of",), help="versions between the weights behind a batch and the trainer's"),
    Metric(name="step_seconds", help="from one publication of weights to the next"),
    Metric(name="stage_seconds", labels=("stage",), help="wall time of the latest run of a stage"),
    Metric(name="steps_total", kind="counter", help="finished steps"),
    Metric(name="weight_bytes_total", kind="counter", help="bytes of weights sent"),
    Metric(name="engine_running_requests", labels=("worker",), help="requests in the engine's latest iteration"),
    Metric(name="engine_waiting_requests", labels=("worker",), help="requests that wait for room in the engine"),
    Metric(name="engine_kv_use_ratio", labels=("worker",), help="share of the KV blocks in use"),
    Metric(name="faults_total", kind="counter", labels=("kind",), help="faults that the run has seen"),
    Metric(name="device_use_ratio", labels=("device",), help="share of the last interval in which a device worked"),
    Metric(name="device_memory_bytes", labels=("device",), help="memory in use: of a GPU its own, of cores the machine's"),
    Metric(name="worker_cpu_cores", labels=("worker",), help="cores that a process has kept busy"),
    Metric(name="worker_memory_bytes", labels=("worker",), help="resident memory of a process"),
    Metric(
        name="network_bytes_total", kind="counter", labels=("interface", "direction"),
        help="through a network interface of this machine since the run began",
    ),
    Metric(name="report_timestamp_seconds", help="when the run last reported a stage or a step, since the epoch"),
)  # fmt: skip
BY_NAME = {metric.name: metric for metric in METRICS}


def now(name: str, selector: str = "", experiment: str | None = "$experiment") -> str:
    """PromQL: the present value of a metric, whatever its iteration and version.

    `selector`: of its own labels; `experiment`: a pattern of runs, None for all. Raises KeyError for a metric that there
    is not.
    """
    metric = BY_NAME[name]
    suffix = "_bucket" if metric.kind == "histogram" else ""
    of = "" if experiment is None else f'experiment_id=~"{experiment}"'
    inside = ", ".join(filter(None, [of, selector]))
    return f"max without (iteration, model_version) ({metric.full_name}{suffix}{{{inside}}})"


def per_second(name: str, selector: str = "", window: str = "1m", experiment: str | None = "$experiment") -> str:
    """PromQL: the rate of a counter over a window. Its series change with the step, so a subquery puts them together."""
    return f"rate(({now(name, selector, experiment)})[{window}:5s])"
