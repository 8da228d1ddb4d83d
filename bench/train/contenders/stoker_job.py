"""A case as a Job: the same tensors, weights, order, batch and optimiser as everybody's."""

from __future__ import annotations

import stoker
from bench.train.cases import WEIGHT_DECAY
from bench.train.material import Material


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
        select="last",
        seed=seed,
        name=case.name,
    )
