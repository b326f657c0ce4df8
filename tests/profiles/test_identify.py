"""What measurements cannot determine is refused, and the missing one is named; what they can is fitted."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.errors import InputError
from lab.measurement import HELD_OUT, Measurement
from profiles.fit import fit, refusal

COST = {"each": 2e-3, "sequences": 5e-5, "linear_flops": 2e-11, "attention_flops": 3e-11, "kv_bytes": 1e-10}


def iteration(sequences: int, context: int, prompt: int = 0, source: str = "sweep", factor: float = 1.0) -> Measurement:
    """Decoding sequences of one context, and one prompt beside them."""
    tokens = sequences + prompt
    attended = sequences * context + prompt * (prompt + 1) / 2
    quantities = {
        "sequences": sequences + float(prompt > 0), "tokens": float(tokens), "linear_flops": 1e6 * tokens + 1e4 * sequences,
        "layers": 4.0, "activations": 1e2 * tokens,
        "attention_flops": 2e3 * attended, "kv_bytes": 2e3 * (sequences * context + prompt), "prefill_steps": float(prompt > 0),
    }  # fmt: skip
    seconds = factor * sum(COST.get(name, 0.0) * value for name, value in (quantities | {"each": 1.0}).items())
    return Measurement(op="engine_step", quantities=quantities, seconds=seconds, source=source)


GRID = [iteration(n, c, p) for n in (1, 8, 64) for c in (16, 64, 256) for p in (0, 32, 128, 512)]


def test_a_grid_is_fitted_and_recovered() -> None:
    assert refusal("engine_step", GRID) is None
    found = fit(GRID, name="p", source={})
    assert found.ops["engine_step"].residual_p90 < 1e-6 and not found.notes


@pytest.mark.parametrize(
    ("points", "words"),
    [
        ([iteration(n, 64) for n in (1, 8, 64)], "same context; measure a second one"),
        ([iteration(8, c) for c in (16, 64, 256)], "same sequences (8)"),
        ([iteration(8, 64)], "measure"),
        ([iteration(0, 0, p) for p in (32, 256, 512)], "same prefill_steps (1)"),
    ],
)
def test_the_missing_measurement_is_named(points: list[Measurement], words: str) -> None:
    assert words in (refusal("engine_step", points) or "")
    with pytest.raises(InputError, match="nothing can be fitted: engine_step"):
        fit(points, name="p", source={})


def test_an_op_that_cannot_be_determined_is_left_out_with_a_note_and_the_others_are_fitted() -> None:
    sync = [Measurement(op="weight_sync", quantities={"calls": 1.0, "bytes": 1e6}, seconds=s) for s in (0.01, 0.02)]
    found = fit([*GRID, *sync], name="p", source={})
    assert set(found.ops) == {"engine_step"}
    assert found.notes == ("weight_sync: all points have the same bytes (1e+06); measure a second one",)
    second = Measurement(op="weight_sync", quantities={"calls": 1.0, "bytes": 4e6}, seconds=0.05)
    assert set(fit([*GRID, *sync, second], name="p", source={}).ops) == {"engine_step", "weight_sync"}


@given(st.integers(0, 99))
def test_noise_does_not_make_dependent_terms_look_independent(seed: int) -> None:
    rng = np.random.default_rng(seed)
    drawn = zip(rng.integers(1, 64, 20), rng.uniform(0.9, 1.1, 20), strict=True)
    points = [iteration(int(n), 64, factor=float(factor)) for n, factor in drawn]
    assert refusal("engine_step", points)


def test_held_out_points_are_never_fitted_and_their_error_is_stored() -> None:
    kept = [iteration(n, c, source=HELD_OUT, factor=1.25) for n in (3, 20) for c in (40, 100)]
    found, alone = fit([*GRID, *kept], name="p", source={}).ops["engine_step"], fit(GRID, name="p", source={})
    assert found.coefficients == alone.ops["engine_step"].coefficients
    assert found.held_out is not None and found.held_out.points == 4
    assert found.held_out.error_p50 == pytest.approx(0.2, rel=1e-6)
    assert found.held_out.bias == pytest.approx(-0.2, rel=1e-6)
    assert refusal("engine_step", kept)


def two_networks(layers: tuple[int, ...]) -> list[Measurement]:
    """Forward passes that take 1 ms per layer and 10 ps per FLOP, of networks with so many layers."""
    shapes = [(n, tokens, context) for n in layers for tokens in (64, 512, 2048) for context in (16, 128)]
    return [
        Measurement(
            op="forward", seconds=1e-3 * n + 1e-11 * 1e6 * n * tokens,
            quantities={
                "passes": 1.0, "layers": float(n), "linear_flops": 1e6 * n * tokens, "activations": 1e2 * n * tokens,
                "attention_flops": 1e2 * n * tokens * context,
            },
        )
        for n, tokens, context in shapes
    ]  # fmt: skip


def test_terms_that_one_network_cannot_tell_apart_are_merged_and_two_networks_tell() -> None:
    one = fit(two_networks((4,)), name="p", source={}).ops["forward"]
    assert one.coefficients["layers"] == 0 and one.coefficients["each"] == pytest.approx(4e-3)
    assert one.ranges["layers"].low == one.ranges["layers"].high == 4  # another network lies outside what was measured
    two = fit(two_networks((4, 12)), name="p", source={}).ops["forward"]
    assert two.coefficients["layers"] == pytest.approx(1e-3) and two.coefficients["each"] == pytest.approx(0, abs=1e-9)
