"""What `stoker verify` says of the order of streams, and of samples that are chosen or put together otherwise."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

import stoker
from stoker.jobs import load_job
from stoker.verifying.exactness_contract import check_order
from tests.stepping.models import make_job, mlp
from tests.verifying.examining import no_time, subject_of

ORDERS = Path(__file__).parents[1] / "flow" / "jobs" / "orders.py"


class Unrepeatable(torch.utils.data.IterableDataset):
    """It draws from a generator of its own, which goes on when it is read again."""

    def __init__(self) -> None:
        self.own = random.Random(0)

    def __iter__(self):
        for index in range(40):
            yield torch.full((6,), self.own.random()), index % 4


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("stream", "stream: one reader in each process; it has no state"),
        ("shuffled", "stream: one reader in each process; it has no state"),
        ("seekable", "seekable: one reader in each process; its own state is kept"),
        ("balanced", "indexed: the order is computed"),
        ("stratified", "indexed: the order is computed"),
        ("bucketed", "indexed: the order is computed"),
        ("in order", "indexed: the order is computed"),
        ("packed", "indexed: the order is computed"),
    ],
)
def test_every_kind_is_the_same_from_any_position(kind: str, words: str) -> None:
    """And says of which class it is."""
    job, _ = load_job(ORDERS, {"kind": kind})
    verdict = check_order(subject_of(job, 4, loader="inline"), no_time())
    assert (verdict.passed, verdict.level) == (True, "bit-equal"), verdict.answer
    assert words in verdict.answer
    assert ("samples of two epochs" in verdict.evidence) == (job.sampling is not None)


def test_a_stream_that_cannot_be_repeated_is_found() -> None:
    """Replaying it gives other samples."""
    job = make_job(mlp, data=stoker.data.stream(Unrepeatable(), length=40))
    verdict = check_order(subject_of(job, 8, loader="inline"), no_time())
    assert (verdict.passed, verdict.level) == (False, "none")
    assert "the same samples with other content" in verdict.answer
