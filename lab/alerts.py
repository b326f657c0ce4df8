"""Alert rules for Prometheus, and the configuration that reads a run and these rules. No clock, no network."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from lab.watched import now

METRICS_PORT = 9464
"""of this machine, where a run says how it is"""
JOB = "lab"


@dataclass(frozen=True, kw_only=True)
class Thresholds:
    """What is too much, and for how long."""

    kl_cap: float = field(default=10.0, metadata={"help": "alert where the KL to the reference exceeds this, nats"})
    reward_sigmas: float = field(
        default=4.0, metadata={"help": "alert where the reward leaves its mean of ten minutes by so many deviations"}
    )
    reward_floor: float = field(default=0.05, metadata={"help": "and by at least this much"})
    idle_use: float = field(default=0.05, metadata={"help": "alert where the devices' mean use stays below this share"})
    idle_for_s: float = field(default=300.0, metadata={"help": "for so many seconds"})
    silence_s: float = field(default=300.0, metadata={"help": "alert where a run reports nothing for so many seconds"})


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One alert."""

    name: str
    expression: str
    for_s: float = 0.0
    severity: str
    summary: str
    description: str


def rules(limits: Thresholds) -> list[Rule]:
    """KL above its cap, reward that drops or jumps, devices that idle, a run that reports nothing or cannot be reached."""
    kl, reward = now("kl", experiment=None), now("reward", experiment=None)
    usual = f"avg_over_time(({reward})[10m:15s] offset 30s)"
    band = f"({limits.reward_sigmas:g} * stddev_over_time(({reward})[10m:15s] offset 30s) + {limits.reward_floor:g})"
    idle = f"avg by (experiment_id, instance) ({now('device_use_ratio', experiment=None)}) < {limits.idle_use:g}"
    silent = f"time() - {now('report_timestamp_seconds', experiment=None)} > {limits.silence_s:g}"
    gone = f'up{{job="{JOB}"}} == 0 and max_over_time(up{{job="{JOB}"}}[15m]) == 1'
    return [
        Rule(
            name="KlAboveCap", expression=f"{kl} > {limits.kl_cap:g}", severity="critical",
            summary="the policy has moved too far from the reference",
            description=f"KL is {{{{ $value }}}} nats, the cap is {limits.kl_cap:g}.",
        ),
        Rule(
            name="RewardDropped", expression=f"{reward} < {usual} - {band}", severity="critical",
            summary="the reward has dropped", description="It is {{ $value }}, far below its mean of ten minutes.",
        ),
        Rule(
            name="RewardJumped", expression=f"{reward} > {usual} + {band}", severity="warning",
            summary="the reward has jumped: look at samples before you believe it",
            description="It is {{ $value }}, far above its mean of ten minutes.",
        ),
        Rule(
            name="DeviceIdle", expression=idle, for_s=limits.idle_for_s, severity="warning",
            summary="devices do next to nothing", description="Their mean use is {{ $value | humanizePercentage }}.",
        ),
        Rule(
            name="ReportingStopped", expression=silent, severity="critical",
            summary="the run is there, and reports nothing", description="Its last report is {{ $value }} s old.",
        ),
        Rule(
            name="RunGone", expression=gone, for_s=60.0, severity="warning",
            summary="the run does not answer any more",
            description="It has ended, or was killed: run.json and log.jsonl in its folder say which.",
        ),
    ]  # fmt: skip


def rules_file(limits: Thresholds) -> dict[str, Any]:
    """What Prometheus reads as a rule file."""
    return {"groups": [{"name": JOB, "rules": [_rule(rule) for rule in rules(limits)]}]}


def _rule(rule: Rule) -> dict[str, Any]:
    return {
        "alert": rule.name, "expr": rule.expression, "for": f"{rule.for_s:g}s", "labels": {"severity": rule.severity},
        "annotations": {"summary": rule.summary, "description": rule.description},
    }  # fmt: skip


def prometheus_file(targets: list[str], rule_files: list[str], interval_s: float = 5.0) -> dict[str, Any]:
    """A configuration of Prometheus that reads runs at `targets`, each HOST:PORT."""
    return {
        "global": {"scrape_interval": _span(interval_s), "evaluation_interval": _span(max(interval_s, 1.0))},
        "rule_files": rule_files,
        "scrape_configs": [{"job_name": JOB, "static_configs": [{"targets": targets}]}],
    }


def _span(seconds: float) -> str:
    return f"{round(seconds * 1000)}ms"
