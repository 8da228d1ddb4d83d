from __future__ import annotations

import pytest

import stoker
from stoker import recipes
from stoker.errors import BadJob
from stoker.jobs.schedules import Ramp
from tests.training.builders import tiny_job


def test_each_sets_one_thing() -> None:
    """The other settings of the job stay as they were."""
    job = tiny_job()
    changed = {
        "schedule": recipes.one_cycle(job, warmup=0.3),
        "loss": recipes.label_smoothing(job, 0.2),
        "average": recipes.ema(job, 0.99),
        "optimizer": recipes.muon(job, 0.1),
    }
    for name, found in changed.items():
        others = set(vars(job)) - {name}
        assert all(getattr(found, other) is getattr(job, other) for other in others), name
    assert changed["schedule"].schedule == Ramp(0.3, 0.04, 0.0, "cosine")
    assert changed["loss"].objective.label_smoothing == 0.2
    assert changed["average"].average == stoker.EMA(0.99)
    assert changed["optimizer"].optimizer == stoker.Muon(lr=0.1, rest=job.optimizer)


def test_muon_takes_adamw_beside_it_where_the_job_has_no_optimiser_to_keep() -> None:
    """A function's optimiser cannot be split, and Muon is no rest for itself."""
    import torch

    of_a_function = recipes.muon(tiny_job(optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1)))
    assert of_a_function.optimizer == stoker.Muon(lr=0.02, rest=stoker.AdamW(lr=3e-4))
    assert recipes.muon(of_a_function, lr=0.1).optimizer == stoker.Muon(lr=0.1, rest=stoker.AdamW(lr=3e-4))


def test_an_average_longer_than_the_run_is_refused() -> None:
    """The run would not come to that decay; a shorter one, and one over epochs, is taken."""
    with pytest.raises(BadJob, match="spans 1000 updates; the run makes 100") as caught:
        recipes.ema(tiny_job(until=stoker.updates(100)))
    assert "at most 0.95" in str(caught.value.remedy)
    assert recipes.ema(tiny_job(until=stoker.updates(100)), 0.95).average is not None
    assert recipes.ema(tiny_job(until=stoker.epochs(100))).average is not None


@pytest.mark.parametrize("decay", [1.0, -0.5])
def test_a_decay_that_is_none_is_refused_in_words(decay: float) -> None:
    """Also where the run's updates are counted, and 1 would span forever."""
    with pytest.raises(BadJob, match="must be between 0 and 1"):
        recipes.ema(tiny_job(until=stoker.updates(100)), decay)


def test_a_job_that_has_no_classes_cannot_be_smoothed() -> None:
    """The Job itself says so."""
    with pytest.raises(BadJob, match="goes with the cross-entropies"):
        recipes.label_smoothing(tiny_job(loss="mse"))
