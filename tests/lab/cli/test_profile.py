"""`lab profile` before it measures: where it cannot write it says so at once, and a kept profile is shown with its fit."""

from pathlib import Path

import pytest

from lab.cli.profile import fit_lines, writable
from lab.errors import InputError
from lab.measurement import HELD_OUT, Measurement
from profiles.fit import fit


def test_a_path_that_cannot_be_written_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"--output: .*cannot be written"):
        writable(tmp_path / "file" / "x.jsonl")
    assert writable(tmp_path / "new" / "x.jsonl").exists()


def test_what_a_fit_does_on_held_out_points_is_said_beside_the_noise_of_their_repeats() -> None:
    def sync(size: float, factor: float = 1.0, source: str = "sweep") -> Measurement:
        quantities = {"calls": 1.0, "bytes": size}
        return Measurement(
            op="broadcast", quantities=quantities, seconds=factor * (1 + size), spread=0.06, source=source
        )

    (line,) = fit_lines(fit([sync(1), sync(9), sync(4, 1.25, HELD_OUT)], name="p", source={}))
    assert line == "broadcast, 1 points held out: error p50 20.0%, p90 20.0%, bias -20.0%; noise of their repeats 3.0%"
    same = fit(
        [sync(1), sync(9), Measurement(op="checkpoint", quantities={"bytes": 5.0}, seconds=1)], name="p", source={}
    )
    assert fit_lines(same) == ["not determined: checkpoint: all points have the same bytes (5); measure a second one"]
