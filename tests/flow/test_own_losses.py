"""Losses that call the model in their own way, from planning to the report; and held-out sets that cannot be used."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import stoker
from stoker.errors import BadJob
from stoker.flow.examples import read_examples
from tests.flow.builders import PLAN, Heard, blobs, blobs_job


class Towers(nn.Module):
    """Two inputs through one batch norm and one layer; how alike they come out."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.shared = nn.BatchNorm1d(6), nn.Linear(6, 3)

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return (self.shared(self.norm(a)) * self.shared(self.norm(b))).sum(1)


def weighted(model: nn.Module, batch: dict[str, torch.Tensor]) -> stoker.Loss:
    """Takes the entries that it needs out of a dict, a weight for each sample among them."""
    output = model(batch["first"], batch["second"])
    losses = F.binary_cross_entropy_with_logits(output, batch["label"].float(), reduction="none")
    return stoker.Loss((losses * batch["weight"]).sum(), batch["weight"].sum())


def towers_job(**changes: Any) -> stoker.Job:
    """Three epochs of such samples, with a set to validate and one to test on."""

    def samples(count: int, seed: int) -> dict[str, torch.Tensor]:
        inputs, label = blobs(count, seed)
        return {"first": inputs, "second": inputs.flip(1), "weight": inputs[:, 0].abs(), "label": label}

    settings: dict[str, Any] = {
        "model": Towers, "data": samples(80, 0), "valid": samples(20, 1), "test": samples(30, 2), "loss": weighted,
        "metrics": [],
    }  # fmt: skip
    return blobs_job(**(settings | changes))


@pytest.mark.parametrize("changes", [{}, {"swa": stoker.SWA(start=0.5)}], ids=["plain", "averaged"])
def test_a_loss_that_calls_the_model_its_own_way_comes_to_its_end(changes: dict[str, Any]) -> None:
    """With metrics and weights; what cannot be shown is told, and cost the run everything."""
    heard = Heard()
    run = stoker.train(towers_job(**changes), plan=PLAN, sink=heard)
    assert run.status == "finished"
    assert run.metrics.keys() == {"valid/loss", "test/loss"}
    assert run.weights().keys() == Towers().state_dict().keys()
    assert read_examples(run.directory) == ()
    words = [fields["message"] for fields in heard.of("warned")]
    for split in ("valid", "test"):
        (said,) = [one for one in words if one.startswith(f"samples of {split} cannot be shown in the report")]
        assert "forward() got an unexpected keyword argument 'first'" in said


def test_with_its_inputs_named_it_has_examples() -> None:
    """As the warning says."""
    run = stoker.train(towers_job(inputs=["first", "second"], model=Renamed), plan=PLAN, sink=Heard())
    assert [one.split for one in read_examples(run.directory)] == ["valid", "test"]


class Renamed(Towers):
    """The towers with arguments that are called as entries of the samples."""

    def forward(self, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        return super().forward(first, second)


@pytest.mark.parametrize("split", ["valid", "test"])
def test_what_is_wrong_with_a_held_out_set_is_told_as_of_that_set(split: str) -> None:
    """Before training: its labels, or the shape of its inputs."""
    inputs, labels = blobs(30)
    with pytest.raises(BadJob, match=rf"evaluating {split}=…: loss: labels go from 7 to 8"):
        stoker.train(blobs_job(**{split: (inputs, labels + 7)}), plan=PLAN, sink=Heard())
    with pytest.raises(BadJob, match=rf"raised RuntimeError evaluating {split}=….*: mat1 and mat2"):
        stoker.train(blobs_job(**{split: (inputs[:, :4], labels)}), plan=PLAN, sink=Heard())
