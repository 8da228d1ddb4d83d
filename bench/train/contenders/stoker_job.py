"""A case as a Job: the same tensors, weights, order, batch and optimiser as everybody's. A job file too."""

from __future__ import annotations

from pathlib import Path

import stoker
from bench.train.cases import WEIGHT_DECAY
from bench.train.material import Material, read_again


def job(folder: str) -> stoker.Job:
    """The case whose material is in `folder`, as a Job."""
    return the_job(read_again(Path(folder)))


def the_job(material: Material, *, seed: int = 0) -> stoker.Job:
    """The case as a Job."""
    case = material.case
    return stoker.Job(
        model=material.model(),
        data=(material.inputs, material.targets),
        loss=case.loss_name,
        optimizer=stoker.AdamW(lr=case.lr, weight_decay=WEIGHT_DECAY),
        batch=case.batch,
        until=stoker.epochs(case.epochs),
        evaluation=stoker.Evaluation(select="last"),
        seed=seed,
        name=case.name,
    )
