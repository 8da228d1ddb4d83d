"""Models of timm, as they come: images in, logits out, batch norms among them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import stoker
from stoker.stepping.coupling import find_coupling
from stoker.stepping.model import build_model
from tests.models.loops import UPDATES, largest_gap, ours, theirs
from tests.stepping.driving import grouped
from tests.stepping.models import samples_of

timm = pytest.importorskip("timm", reason="timm is not installed")

CLASSES, SIDE = 4, 32


def job_of(name: str, **changed: Any) -> stoker.Job:
    """A classifier of small images."""
    draw = torch.Generator().manual_seed(0)
    labels = torch.randint(CLASSES, (48,), generator=draw)
    images = torch.randn(48, 3, SIDE, SIDE, generator=draw) + labels[:, None, None, None] / 2
    given: dict[str, Any] = {
        "model": lambda: timm.create_model(name, num_classes=CLASSES),
        "data": (images, labels),
        "batch": 12,
        "loss": "cross_entropy",
        "optimizer": stoker.SGD(lr=0.02, momentum=0.9),
        "until": stoker.updates(UPDATES),
    }
    return stoker.Job(**{**given, **changed})


def test_a_timm_model_learns_as_in_a_plain_loop() -> None:
    """To 1e-5 over 50 updates, batch norms included; the probe finds those, and that they are all."""
    job = job_of("test_resnet")
    expected = theirs(
        job,
        lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
        lambda parameters: torch.optim.SGD(parameters, lr=0.02, momentum=0.9),
    )
    assert largest_gap(ours(job, grouped(job.batch)), expected) < 1e-5
    assert expected[-1] < expected[0]
    assert find_coupling(job, samples_of(job)).kind == "batch_norm"


def test_a_backbone_frozen_by_name_keeps_its_statistics() -> None:
    """Everything but timm's classifier, batch norms too: nothing of it moves, and nothing couples samples any more."""
    job = job_of("test_resnet", freeze=("conv1.*", "bn1.*", "layer*"))
    model: Any = build_model(job)
    assert [name for name, p in model.named_parameters() if p.requires_grad] == ["fc.weight", "fc.bias"]
    assert not model.bn1.training
    assert find_coupling(job, samples_of(job)).kind == "separable"
