"""The learning-rate range test on problems whose edge is known, and where there is no answer."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

import stoker
from stoker.errors import BadJob
from stoker.records import Plan, dumps, loads
from stoker.tuning.lr_range_test import BELOW_EDGE, LrRange, Sweep, edge_of, has_run_away, read_sweeps, smoothed
from tests.flow.builders import blobs_job

pytestmark = pytest.mark.usefixtures("place")

PLAN = Plan(device="cpu", micro_batch=32)


class Bowl(nn.Module):
    """Outputs sqrt(curvature) · w, so that half their square is a quadratic of that curvature."""

    def __init__(self, curvature: float) -> None:
        super().__init__()
        self.scale = math.sqrt(curvature)
        self.w = nn.Parameter(torch.randn(4) + 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The same for each sample [B, 4]."""
        return self.scale * self.w.expand(len(x), 4)


def half_square(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Half the squared distance of each sample [B]."""
    return 0.5 * (output - target).square().sum(1)


def bowl_job(curvature: float = 50.0, noise: float = 0.0, **changes: Any) -> stoker.Job:
    """A quadratic of that curvature under SGD; with noise, each sample has a minimum of its own."""
    target = noise * torch.randn(320, 4, generator=torch.Generator().manual_seed(0))
    settings: dict[str, Any] = {
        "model": lambda: Bowl(curvature),
        "data": (torch.zeros(320, 1), target),
        "loss": half_square,
        "optimizer": stoker.SGD(lr=1e-3),
        "batch": 32,
        "until": stoker.epochs(1),
    }
    return stoker.Job(**(settings | changes))


@pytest.mark.parametrize("curvature", [5.0, 50.0, 2000.0])
def test_the_edge_of_a_quadratic_is_found(curvature: float) -> None:
    """Plain gradient descent runs away beyond 2 / L; the suggestion is a quarter of what was found."""
    found = stoker.lr_range(bowl_job(curvature), plan=PLAN)
    assert found.is_clear
    assert found.edge is not None
    assert 1 / 1.18**2 < found.edge * curvature / 2 < 1.18**2  # neighbouring rates differ by 1.18
    assert found.lr == pytest.approx(found.edge / BELOW_EDGE)
    assert found.low < found.lr < found.high


def test_the_edge_is_found_under_noise() -> None:
    """Where single samples disagree, the loss rises before 2 / L, with the noise it takes in: the edge is below."""
    found = stoker.lr_range(bowl_job(50.0, noise=5.0), plan=PLAN)
    assert found.is_clear
    assert found.edge is not None
    assert 2 / 50 / 5 < found.edge < 2 / 50 * 1.18
    assert found.spread is not None
    assert found.spread < 3


def test_the_same_test_gives_the_same_answer_but_for_the_time() -> None:
    """Every draw is keyed by the job's seed."""
    one, other = (stoker.lr_range(bowl_job(noise=1.0), plan=PLAN, updates=60) for _ in range(2))
    assert dataclasses.replace(other, took_s=one.took_s) == one


def test_the_job_and_the_process_are_left_as_they_were() -> None:
    """The module handed over keeps its weights, and the program's generators their states."""
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 2))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    job = blobs_job(model=model)
    stated = (job.optimizer, job.seed, job.schedule)
    torch.manual_seed(3)
    random.seed(3)
    expected = torch.get_rng_state()
    stoker.lr_range(job, plan=Plan(device="cpu", micro_batch=16), updates=20)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert (job.optimizer, job.seed, job.schedule) == stated
    assert torch.equal(torch.get_rng_state(), expected)


def test_rates_of_groups_keep_their_ratio() -> None:
    """What is swept and reported is the first group's rate; a user's own optimiser is swept like Stoker's."""
    ours = stoker.lr_range(bowl_job(), plan=PLAN, updates=60)
    theirs = stoker.lr_range(
        bowl_job(optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.3)), plan=PLAN, updates=60
    )
    assert (ours.stated_lr, theirs.stated_lr) == (1e-3, 0.3)
    assert theirs.edge == ours.edge


def test_an_optimiser_that_takes_no_schedule_is_swept_too() -> None:
    """What the sweep turns is no schedule of the job's."""
    found = stoker.lr_range(
        bowl_job(optimizer=stoker.optimizers.ScheduleFreeSGD(lr=1e-3)), plan=PLAN, updates=60, highest=100.0
    )
    assert found.stated_lr == 1e-3
    assert found.edge is not None


def test_a_loss_that_never_runs_away_has_no_clear_answer() -> None:
    """A sweep that ends too low says so, and names a rate all the same: what the job says."""
    found = stoker.lr_range(bowl_job(0.01), plan=PLAN, updates=40)
    assert not found.is_clear
    assert "no clear answer: up to 10 the loss did not run away in every sweep; use 0.001" in found.why
    assert (found.lr, found.edge) == (1e-3, None)


def test_a_sweep_that_is_out_of_time_says_so() -> None:
    """What was found until then is kept; the answer is not clear."""
    found = stoker.lr_range(bowl_job(), plan=PLAN, seconds=1e-6)
    assert not found.is_clear
    assert "the time was over at a rate of" in found.why
    assert found.num_updates < 10


def test_a_loss_that_is_not_finite_from_the_start_is_no_answer() -> None:
    """No rate is to blame for the first loss."""
    with pytest.raises(BadJob, match="nan at update 1"):
        stoker.lr_range(bowl_job(loss=lambda output, target: half_square(output, target) * math.nan), plan=PLAN)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"lowest": 1.0, "highest": 0.1}, "rates rise from lowest to highest, got 1 to 0.1"),
        ({"updates": 5}, "20 to 1000 updates, got 5"),
        ({"seeds": 1}, "at least 2, got 1"),
        ({"seconds": 0.0}, "must be positive, got 0.0 s"),
    ],
)
def test_settings_that_cannot_tell_anything_are_refused(given: dict[str, Any], words: str) -> None:
    """Before anything is prepared."""
    with pytest.raises(BadJob, match=words):
        stoker.lr_range(bowl_job(), **given)


def sweep(losses: Sequence[float], *, seed: int = 0) -> Sweep:
    """A sweep with those losses."""
    return Sweep(seed=seed, losses=tuple(losses), edge=edge_of(RATES, losses))


RATES = tuple(10 ** (-6 + i / 10) for i in range(70))


def curve(turn: int, *, fall: float = 1.0) -> list[float]:
    """A loss that falls from the tenth rate on, turns at the rate `turn`, and runs away."""
    falling = [2.0 - fall * max(0, i - 10) / (turn - 10) for i in range(turn + 1)]
    return falling + [falling[-1] + 0.3 * 1.6**i for i in range(9)]


def test_a_short_leap_is_no_running_away() -> None:
    """Three bad updates out of which training recovers are passed over."""
    losses = curve(40)[:41]
    assert not has_run_away([*losses, 9.0, 9.0, 9.0, 1.0, 1.0])
    assert has_run_away(curve(40))
    assert has_run_away([2.0, math.inf])


def test_the_turn_is_found_where_it_is() -> None:
    """The median leaves it in its place, and a lower loss by chance long before does not stand for it."""
    losses = curve(40)
    losses[20:23] = [0.5, 0.5, 0.5]
    assert smoothed(losses)[21] == 0.5
    assert edge_of(RATES, losses) == RATES[40]


def test_seeds_that_disagree_give_the_careful_answer() -> None:
    """Edges at a ratio of ten: a quarter of the lower, unless the job says less."""
    sweeps = [sweep(curve(35)), sweep(curve(45), seed=1)]
    found = read_sweeps(RATES, sweeps, stated_lr=1.0, batch=8, took_s=0.0)
    assert not found.is_clear
    assert "-fold from seed to seed; use" in found.why
    assert found.lr == pytest.approx(RATES[35] / BELOW_EDGE)
    assert read_sweeps(RATES, sweeps, stated_lr=1e-5, batch=8, took_s=0.0).lr == 1e-5


def test_a_loss_that_does_not_fall_is_no_answer() -> None:
    """If all that happens is running away, no rate was good."""
    draws = random.Random(0)
    flat = [2.0 + draws.gauss(0.0, 0.1) for _ in range(41)] + [2.5 + 0.5 * 1.6**i for i in range(9)]
    found = read_sweeps(RATES, [sweep(flat), sweep(flat, seed=1)], stated_lr=1e-4, batch=8, took_s=0.0)
    assert not found.is_clear
    assert "does not fall by more than its noise" in found.why


def test_the_record_survives_the_codec() -> None:
    """It can be stored and read; the mean is over the seeds that got so far."""
    sweeps = [sweep([2.0, 1.0]), sweep([4.0], seed=1)]
    found = read_sweeps(RATES, sweeps, stated_lr=0.1, batch=8, took_s=0.0)
    assert loads(dumps(found), LrRange) == found
    assert found.mean_losses() == (3.0, 1.0)
