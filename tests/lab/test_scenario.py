from pathlib import Path

import pytest

from lab.errors import InputError
from lab.load import load, parse

QUICK = Path("scenarios/quickstart.yaml").read_text()
BIG = load("scenarios/ppo-7b-16gpu.yaml")


def test_the_digest_ignores_form_and_follows_content() -> None:
    base = parse(QUICK)
    assert parse("# comment\n" + QUICK.replace("seed: 7", "seed:   7")).digest == base.digest
    assert parse(QUICK.replace("sampling", "sampling") + "\nsampling: {temperature: 1.0}").digest == base.digest
    assert parse(QUICK.replace("seed: 7", "seed: 8")).digest != base.digest


def test_workers_stand_on_disjoint_devices_where_pools_are_exclusive() -> None:
    devices = [device for worker in BIG.workers.values() for device in worker.devices]
    assert len(devices) == len(set(devices)) == 11
    assert [worker.devices for worker in BIG.team("actor", "train")] == [
        ("train[0]", "train[1]"), ("train[2]", "train[3]"), ("train[4]", "train[5]")
    ]  # fmt: skip
    assert [worker.devices for worker in BIG.team("actor", "generate")] == [("serve[2]",), ("serve[3]",)]


@pytest.mark.parametrize(("size", "accepted"), [(2, True), (3, False), (4, True)])
def test_groups_of_a_resident_pool_share_all_their_devices_or_none(size: int, accepted: bool) -> None:
    text = Path("scenarios/ppo-7b-16gpu.yaml").read_text()
    text = text.replace(
        'reference: "serve[0]", reward: "serve[1]", rollout: "serve[2:4]"}',
        f'judges: "serve[0:{size}]", rollout: "train[10:12]"}}',
    )
    text = text.replace('spare: "train[7:12]", ', "").replace("place:", "sharing: {judges: {how: resident}}\nplace:")
    for pool in ("reference", "reward"):
        text = text.replace(f"{{pool: {pool},", "{pool: judges, tensor_parallel: 2,")
    if accepted:
        assert parse(text).devices["judges"]
    else:
        with pytest.raises(InputError, match="share only some"):
            parse(text)


def test_like_is_followed() -> None:
    assert BIG.spec("critic") == BIG.spec("actor") and parse(QUICK).spec("reference").hidden == 128
