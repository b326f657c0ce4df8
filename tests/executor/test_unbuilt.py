"""What is only simulated is refused by name, and nothing else is."""

import pytest

from executor import unbuilt
from lab.load import load


def test_a_set_key_is_named_and_a_default_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = load("scenarios/quickstart.yaml")
    table = {"update.recompute": "r", "place.actor.generate.*.pool": "p", "place.reward.score.dtype": "d"}
    monkeypatch.setattr(unbuilt, "ONLY_SIMULATED", table)
    assert [key for key, _, _ in unbuilt.unbuilt(chosen)] == ["place.actor.generate[0].pool"]
    changed = chosen.replace({"update": chosen.update.model_dump(mode="json") | {"recompute": "full"}})
    assert [key for key, _, _ in unbuilt.unbuilt(changed)] == ["update.recompute", "place.actor.generate[0].pool"]


def test_the_shipped_scenarios_are_executed() -> None:
    for name in ("quickstart", "ppo-tiny", "grpo-learns"):
        assert list(unbuilt.unbuilt(load(f"scenarios/{name}.yaml"))) == []
