"""The checkpoint interval in the simulator: drawn failures cost what Daly's formula says, least at his interval."""

import pytest

from simulator.studies.intervals import costs, sweep


def test_the_simulated_cost_follows_the_formula_and_is_least_where_it_says() -> None:
    chosen = costs().chosen
    known, rows = sweep([max(chosen // 4, 1), chosen, 5 * chosen], num_steps=1200, seeds=[0])
    for row in rows:
        noise = row.num_faults**-0.5 * (row.expected - 1 - known.write_s / known.step_s / row.every_steps)
        assert row.num_faults > 15
        assert row.cost == pytest.approx(row.expected, abs=3 * noise)
    assert min(rows, key=lambda row: row.cost).every_steps == chosen
    best = min(known.expected(every) for every in range(1, 20 * chosen))
    assert known.expected(chosen) <= 1.02 * best
