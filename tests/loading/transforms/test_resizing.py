"""Progressive resizing: the schedule, and images that do not depend on how a batch is cut."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

import stoker
from stoker.errors import BadJob, BadSetting
from stoker.jobs.job_description import describe_settings
from stoker.loading.batches import Batch
from stoker.loading.datasets import datasets_of
from stoker.loading.lengths import has_one_shape
from stoker.loading.transforms import Draw, ProgressiveResizing, RandomShift
from stoker.stepping.step import Step
from tests.loading.transforms.pictures import CPU, images
from tests.stepping.driving import SEPARABLE, largest_difference, plan_of, source_of
from tests.stepping.models import CLASSES, cnn, make_job

RESIZING = ProgressiveResizing(initial_scale=0.5, delay_fraction=0.25, finetune_fraction=0.25, size_increment=2)


def drawn(first: int, stop: int, progress: float) -> Draw:
    """Draws at that share of a run."""
    return Draw(0, 0, np.arange(first, stop), CPU, progress)


def test_sides_grow_to_the_whole_image() -> None:
    """Small until the delay, then never smaller than before, whole in the last part; odd sides end whole too."""
    sides = [RESIZING.side(27, step / 20) for step in range(21)]
    assert sides[:6] == [14] * 6
    assert sides == sorted(sides)
    assert sides[15:] == [27] * 6
    assert all(side % 2 == 0 for side in sides[:15])


@pytest.mark.parametrize("delay", [0.0, 0.5, 0.75, 0.9, 1.0])
def test_images_may_become_whole_at_once(delay: float) -> None:
    """Small for a first part of the run and whole for the rest, without a time in which they grow."""
    resizing = ProgressiveResizing(0.5, delay_fraction=delay, finetune_fraction=1 - delay)
    sides = [resizing.side(32, step / 20) for step in range(20)]
    assert sides == [16 if step / 20 < delay - 1e-9 else 32 for step in range(20)]


def test_the_forecast_cost_is_the_mean_of_the_pixels() -> None:
    """The closed form against a sum over the run."""
    steps = 10_000
    mean = sum(RESIZING.scale((step + 0.5) / steps) ** 2 for step in range(steps)) / steps
    assert RESIZING.relative_cost() == pytest.approx(mean, rel=1e-4)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.float64])
@pytest.mark.parametrize("progress", [0.0, 0.4, 0.6])
def test_images_do_not_depend_on_the_cut(dtype: torch.dtype, progress: float) -> None:
    """Bit for bit the same one by one as in a batch, in the type of the data."""
    x_BCHW = images((37, 3, 26, 31), dtype)
    whole = RESIZING(x_BCHW, drawn(0, 37, progress))
    one_by_one = torch.cat([RESIZING(x_BCHW[i : i + 1], drawn(i, i + 1, progress)) for i in range(37)])
    assert whole.dtype == dtype
    assert whole.shape[2] < 26
    assert torch.equal(whole, one_by_one)


def test_outside_of_a_run_images_are_whole() -> None:
    """Evaluation, probes, traces and trials, which give no progress, see whole images."""
    x_BCHW = images((4, 1, 28, 28))
    assert RESIZING(x_BCHW, Draw(0, 0, np.arange(4), CPU)) is x_BCHW


@pytest.mark.parametrize(
    "wrong",
    [
        {"initial_scale": 0},
        {"initial_scale": 1.5},
        {"delay_fraction": 0.9},
        {"finetune_fraction": -0.1},
        {"size_increment": 0},
    ],
)
def test_impossible_settings_are_refused(wrong: dict[str, float]) -> None:
    """Each with its number."""
    with pytest.raises(BadSetting, match=str(next(iter(wrong.values())))):
        ProgressiveResizing(**wrong)  # type: ignore[arg-type]


def test_vectors_are_refused() -> None:
    """The error names the shape."""
    with pytest.raises(BadJob, match=r"\[4, 6\]"):
        RESIZING(torch.zeros(4, 6), drawn(0, 4, 0.0))


def job() -> stoker.Job:
    """Images of 12 pixels that begin at 6."""
    random = torch.Generator().manual_seed(1)
    data = torch.randn(64, 1, 12, 12, generator=random), torch.randint(CLASSES, (64,), generator=random)
    return make_job(cnn, data=data, batch=20, augment=[RandomShift(1), RESIZING])


def advance(step: Step, begin: int, end: int, seen: list[int] | None = None) -> None:
    """Make those updates of a run of 12, as the training loop does."""
    position = source_of(step.job, step).extent.position(begin)
    for update, batch in enumerate(source_of(step.job, step).batches(position, end), begin):
        at_progress = dataclasses.replace(batch, progress=update / 12)
        if seen is not None:
            seen.append(at_progress.cut(0, 1)[0].shape[-1])
        step.update(at_progress, update, update / 12)


def test_micro_batches_learn_what_the_whole_batch_does() -> None:
    """To 1e-9 in float64 over a run whose images grow."""
    sides: list[int] = []
    steps = [Step(job(), plan_of(size), SEPARABLE, dtype=torch.float64) for size in (7, 20)]
    for step in steps:
        advance(step, 0, 12, sides)
    assert sides[:12] == sides[12:]
    assert (sides[0], sides[-1]) == (6, 12)
    assert largest_difference(*steps) < 1e-9


def test_the_run_is_known_to_have_several_shapes() -> None:
    """So that no plan of one shape is captured; the setting is part of the job's identity."""
    assert not has_one_shape(job(), datasets_of(job()).train)
    described = describe_settings(job())["augment"][1]  # type: ignore[index,call-overload]
    assert (described["type"], described["initial_scale"]) == ("ProgressiveResizing", 0.5)


def test_a_run_resizes_by_its_own_progress(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    """`stoker.train` shows the model small images first and whole ones last, and evaluates whole ones."""
    sides: list[int] = []
    update = Step.update

    def watched(self: Step, batch: Batch, *args: object) -> torch.Tensor:
        sides.append(batch.cut(0, 1)[0].shape[-1])
        return update(self, batch, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(Step, "update", watched)
    stoker.train(dataclasses.replace(job(), until=stoker.updates(12)), run_dir=tmp_path / "run", plan=plan_of(20))
    assert sides[-12:-9] == [6, 6, 6]
    assert sides[-12:] == sorted(sides[-12:])
    assert sides[-1] == 12
