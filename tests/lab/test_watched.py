"""The list of metrics, and what is made of it: the dashboard, the alert rules, the files in docs/watching."""

import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from lab.alerts import METRICS_PORT, Thresholds, prometheus_file, rules, rules_file
from lab.cli.dashboard import FILES, written
from lab.dashboard import ROWS, dashboard, queries
from lab.watched import BY_NAME, LABELS, METRICS, now, per_second

ROOT = Path(__file__).resolve().parents[2]
NAMED = re.compile(r"lab_([a-z0-9_]+?)(?:_bucket)?\{")


def test_metrics_are_named_as_prometheus_wants() -> None:
    assert len(BY_NAME) == len(METRICS)
    for metric in METRICS:
        assert re.fullmatch(r"[a-z][a-z0-9_]*", metric.name)
        assert (metric.kind == "counter") == metric.name.endswith("_total")
        assert (metric.kind == "histogram") == bool(metric.edges) and list(metric.edges) == sorted(set(metric.edges))
        assert not set(metric.labels) & {*LABELS, "le", "job", "instance"}
        assert metric.help and not metric.help.endswith(".")
        assert all(bool(label) == bool(metric.labels) for label, _ in metric.learned)


def test_every_metric_is_shown_or_alerted_on_and_no_query_names_another() -> None:
    asked = [*queries(), *(rule.expression for rule in rules(Thresholds()))]
    named = {name for query in asked for name in NAMED.findall(query)}
    assert named <= BY_NAME.keys()
    only_scraped = {
        "clip_fraction", "effective_sample_ratio", "learning_rate", "temperature", "logprob_gap", "samples_per_second",
        "steps_total", "weight_bytes_total", "faults_total",
    }  # fmt: skip
    assert BY_NAME.keys() - named == only_scraped


@pytest.mark.parametrize("wanted", [
    "Reward", "KL to the reference", "Entropy", "Critic loss", "Response tokens", "Buffer: rates", "Buffer: depth", "Lag",
    "Device use", "Device memory", "Network", "Response length", "Distinct n-grams", "Rewards", "Advantages", "KL of samples",
])  # fmt: skip
def test_the_dashboard_has_the_panel(wanted: str) -> None:
    assert wanted in {panel["title"] for panel in dashboard()["panels"]}


def test_panels_do_not_overlap_and_have_ids_of_their_own() -> None:
    panels = dashboard()["panels"]
    assert [panel["id"] for panel in panels] == list(range(1, len(panels) + 1))
    assert len(panels) == len(ROWS) + sum(map(len, ROWS.values()))
    taken: set[tuple[int, int]] = set()
    for place in (panel["gridPos"] for panel in panels):
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken and place["x"] + place["w"] <= 24
        taken |= cells


def test_a_query_of_a_metric_that_there_is_not_fails() -> None:
    with pytest.raises(KeyError):
        now("rewards")
    assert now("kl", experiment=None) == "max without (iteration, model_version) (lab_kl{})"
    assert per_second("samples_total", 'fate="trained"', "2m", None) == (
        'rate((max without (iteration, model_version) (lab_samples_total{fate="trained"}))[2m:5s])'
    )


def test_the_files_in_docs_are_what_the_command_writes(tmp_path: Path) -> None:
    for path in written(tmp_path / "new", [f"127.0.0.1:{METRICS_PORT}"], Thresholds()):
        assert path.read_text() == (ROOT / "docs" / "watching" / path.name).read_text(), (
            f"run `lab dashboard`: {path.name}"
        )


# ---------------------------------------------------------------- with Prometheus' own tool


promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="no promtool: apt-get install prometheus (make test does it)"
)


def tool(*words: str | Path, cwd: Path) -> str:
    answer = subprocess.run(["promtool", *map(str, words)], cwd=cwd, capture_output=True, text=True, timeout=60)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    return answer.stdout + answer.stderr


@promtool
def test_prometheus_takes_the_rules_and_the_configuration(tmp_path: Path) -> None:
    written(tmp_path, ["127.0.0.1:1"], Thresholds())
    assert f"SUCCESS: {len(rules(Thresholds()))} rules found" in tool("check", "rules", FILES[1], cwd=tmp_path)
    assert "SUCCESS" in tool("check", "config", FILES[2], cwd=tmp_path)


def series(name: str, values: str, version: int = 1, **labels: str) -> dict[str, str]:
    own = "".join(f', {key}="{value}"' for key, value in labels.items())
    said = f'lab_{name}{{experiment_id="a", instance="h", iteration="{version}", model_version="{version}"{own}}}'
    return {"series": said, "values": values}


STEADY, RISING = "0.5+0x45", "0+0.01x45"
CASES: dict[str, tuple[list[dict[str, str]], list[str]]] = {
    "KL below its cap in every step": ([series("kl", "9.9x19 stale"), series("kl", "_x20 9.9x20", 2)], []),
    "KL above its cap in the latest step": ([series("kl", "1x39 stale"), series("kl", "_x40 12x5", 2)], ["KlAboveCap"]),
    "a KL that was above its cap a while ago": ([series("kl", "12x19 stale"), series("kl", "_x20 1x25", 2)], []),
    "a steady reward": ([series("reward", STEADY)], []),
    "a reward that rises as it learns": ([series("reward", RISING)], []),
    "a reward that falls from one step to the next": (
        [series("reward", "0.5x42 stale"), series("reward", "_x43 0.1x4", 2)], ["RewardDropped"],
    ),
    "a reward that leaps": ([series("reward", "0.1x42 stale"), series("reward", "_x43 0.9x4", 2)], ["RewardJumped"]),
    "devices at work": ([series("device_use_ratio", "0.9x45", device="core0")], []),
    "one of two devices at work": (
        [series("device_use_ratio", "0.9x45", device="core0"), series("device_use_ratio", "0x45", device="core1")], [],
    ),
    "devices that idle": ([series("device_use_ratio", "0.01x45", device=f"core{i}") for i in range(2)], ["DeviceIdle"]),
    "a run that reports": ([series("report_timestamp_seconds", "0+15x45")], []),
    "a run that reports no more": ([series("report_timestamp_seconds", "100x45")], ["ReportingStopped"]),
    "a run that is gone": ([{"series": 'up{job="lab", instance="h"}', "values": "1x30 0x15"}], ["RunGone"]),
    "a run that answers": ([{"series": 'up{job="lab", instance="h"}', "values": "1x45"}], []),
    "a run that never was": ([{"series": 'up{job="lab", instance="h"}', "values": "0x45"}], []),
}  # fmt: skip


@promtool
def test_alerts_fire_when_they_should_and_only_then(tmp_path: Path) -> None:
    """At the eleventh minute, with a reading every fifteen seconds; iterations change on the way."""
    known = {rule.name: rule for rule in rules(Thresholds())}
    cases = []
    for name, (given, fires) in CASES.items():
        expected = [{"eval_time": "11m", "alertname": rule, "exp_alerts": [firing(known[rule], given)] if rule in fires else []}
                    for rule in known]  # fmt: skip
        cases.append({"name": name, "interval": "15s", "input_series": given, "alert_rule_test": expected})
    plain = {"groups": [group | {"rules": [one | {"annotations": {}} for one in group["rules"]]}
                        for group in rules_file(Thresholds())["groups"]]}  # fmt: skip
    (tmp_path / "rules.yml").write_text(yaml.safe_dump(plain))
    tests = {"rule_files": ["rules.yml"], "evaluation_interval": "15s", "tests": cases}
    (tmp_path / "tests.yml").write_text(yaml.safe_dump(tests))
    assert "SUCCESS" in tool("test", "rules", "tests.yml", cwd=tmp_path)


def firing(rule: Any, given: list[dict[str, str]]) -> dict[str, Any]:
    """What an alert says of itself: the labels that its expression leaves."""
    labels = {"instance": "h"} | ({"job": "lab"} if rule.name == "RunGone" else {"experiment_id": "a"})
    return {"exp_labels": labels | {"severity": rule.severity}}


@promtool
def test_a_threshold_is_in_the_rule(tmp_path: Path) -> None:
    strict = replace(Thresholds(), kl_cap=0.5, idle_use=0.9, silence_s=7.0)
    texts = {rule.name: rule.expression for rule in rules(strict)}
    assert texts["KlAboveCap"].endswith("> 0.5") and texts["DeviceIdle"].endswith("< 0.9")
    assert texts["ReportingStopped"].endswith("> 7")
    config = prometheus_file(["h:1", "h:2"], [], 0.25)
    assert config["global"]["scrape_interval"] == "250ms"
    assert config["scrape_configs"][0]["static_configs"] == [{"targets": ["h:1", "h:2"]}]
