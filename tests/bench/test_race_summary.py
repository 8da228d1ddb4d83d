from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.serving.race.contenders import contenders
from bench.serving.race.samples import Format
from bench.serving.race.summary import lines, summary, throughput_at
from bench.serving.race.turns import best_settings, round_turns, tuning_turns
from bench.serving.race.workloads import WORKLOADS
from stoker.records import TensorSpec

POINTS = {1: (100.0, 0.01), 4: (300.0, 0.02), 16: (400.0, 0.08), 64: (390.0, 0.3)}
TEXT = Format(
    (
        TensorSpec(name="ids", datatype="INT64", shape=("batch", "tokens"), pad=7.0),
        TensorSpec(name="mask", datatype="INT64", shape=("batch", "tokens"), pad=0.0),
    )
)


def cell(per_s: float, p99_s: float) -> dict[str, object]:
    """A measurement of one second."""
    return {"answered": per_s, "duration_s": 1.0, "quantiles": [{"q": 0.99, "seconds": p99_s}], "failures": {}}


@pytest.mark.parametrize(("p99_s", "rate"), [(0.005, 0), (0.01, 100), (0.02, 300), (0.04, 350), (0.08, 400), (1, 400)])
def test_throughput_within_a_p99_is_read_between_points(p99_s: float, rate: float) -> None:
    """At a point its own, half way by the logarithm the middle, below all none; more load that gave less is no loss."""
    assert throughput_at(POINTS, p99_s) == pytest.approx(rate)


@given(st.floats(0.001, 1), st.floats(0.001, 1))
def test_more_time_never_means_less_throughput(one: float, other: float) -> None:
    """The curve only rises."""
    assert throughput_at(POINTS, min(one, other)) <= throughput_at(POINTS, max(one, other))


@given(st.lists(st.integers(1, 9), min_size=1, max_size=5))
def test_bodies_come_back_and_share_a_batch(lengths: list[int]) -> None:
    """What is encoded is decoded; in a batch each is followed by its input's padding."""
    samples = [{"ids": np.arange(n), "mask": np.ones(n, dtype=np.int64)} for n in lengths]
    back = [TEXT.decode(TEXT.encode(sample)) for sample in samples]
    batch = TEXT.stack(back)
    for row, sample in enumerate(samples):
        n = len(sample["ids"])
        assert (batch["ids"][row, :n] == sample["ids"]).all()
        assert (batch["ids"][row, n:] == 7).all()
        assert batch["mask"][row].sum() == n


def test_the_best_setting_is_the_fastest_that_answered() -> None:
    """A setting that failed does not count, and who never answered does not race."""
    workload, racers = WORKLOADS[0], [contenders(8)["stoker"], contenders(8)["ray"]]
    cells: dict[str, object] = {}
    for number, turn in enumerate(tuning_turns(workload, racers)):
        name = turn.key(16)
        cells[name] = cell(100 + number, 0.1) if turn.contender.name == "stoker" and number < 3 else {"error": "no"}
    best = best_settings(workload, racers, cells)
    assert best == {"stoker": racers[0].settings[2]}
    assert [turn.contender.name for turn in round_turns(1, workload, racers, best)] == ["stoker"]


def test_ratios_are_taken_at_equal_p99_of_the_same_round() -> None:
    """Twice as fast at every load: 2 at equal callers; at equal p99 more, since we have their throughput earlier."""
    cells = {}
    for callers, (rate, p99_s) in POINTS.items():
        cells[f"cnn/stoker/round 0/1x2 b16 0ms/{callers}"] = cell(2 * rate, p99_s / 2)
        cells[f"cnn/litserve/round 0/1x2 b16 0ms/{callers}"] = cell(rate, p99_s)
    found = summary(cells, {"cnn/stoker": [{"1x2 b16": 1000.0, "1x2 b1": 400.0}]}, rounds=1)["cnn"]
    ratios = found["stoker / others"]["litserve"]
    assert all(one["median"] == 2 for one in ratios["at equal callers"].values())
    assert ratios["at equal p99"][1]["median"] == 6
    assert found["stoker / best peer at equal p99"][1] == 6
    assert found["stoker / engine alone"]["median"] == 0.8
    page = "\n".join(lines({"cnn": found}))
    assert "stoker / best peer at equal p99: 1: 6.00" in page
    assert "800/s   40.0 ms" in page
