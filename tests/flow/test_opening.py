"""Plans over other processes than they were made for."""

from __future__ import annotations

import dataclasses

import pytest

import stoker
from stoker.records import Coupling, Layout
from stoker.stepping.layouts.compatibility import micro_batch_problem
from stoker.training.run_setup import plan_for_layout
from tests.flow.builders import PLAN, blobs_job

NORMS = Coupling(kind="batch_norm", group=16, causes=("BatchNorm1d",), evidence="")
ALONE = Coupling(kind="separable", group=None, causes=(), evidence="")


@pytest.mark.parametrize(
    ("coupling", "micro_batch", "processes", "goes_on_with"),
    [
        (NORMS, 4, 1, 16),  # each of four took a quarter of a group
        (NORMS, 4, 3, 6),
        (NORMS, 4, 4, 4),
        (NORMS, 16, 2, 16),  # more than a part is legal
        (ALONE, 4, 1, 4),
        (ALONE, 4, 3, 4),
    ],
)
def test_a_micro_batch_becomes_as_large_as_coupled_samples_need(
    coupling: Coupling, micro_batch: int, processes: int, goes_on_with: int
) -> None:
    """And stays what it was where that is legal: what a run learns does not depend on who is left."""
    job, layout = blobs_job(), Layout(replicas=processes)
    found = plan_for_layout(layout, dataclasses.replace(PLAN, micro_batch=micro_batch), coupling, job)
    assert (found.micro_batch, found.layout) == (goes_on_with, layout)
    assert micro_batch_problem(coupling, found.micro_batch, job.batch, layout) is None


def test_sites_that_train_apart_keep_whole_groups() -> None:
    """Each of them is like one process: none takes a part of a group."""
    job = blobs_job(sync=stoker.DiLoCo(every=stoker.updates(5)))
    found = plan_for_layout(Layout(replicas=2), dataclasses.replace(PLAN, micro_batch=8), NORMS, job)
    assert found.micro_batch == 16
