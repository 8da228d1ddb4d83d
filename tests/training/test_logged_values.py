from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

import stoker
from stoker.errors import BadJob
from stoker.records import Event, Position
from stoker.store import RunDirectory
from stoker.tracking.run_tracking import points_of
from stoker.training.logged_values import RunLogger, logging_to


@dataclass
class Loop:
    """As much of a training loop as a logger asks for."""

    reached: Position


def test_values_wait_for_the_next_event(tmp_path: Path) -> None:
    """Many calls are one event, each value at the position where it was logged; trackers receive all of them."""
    written: list[Event] = []
    loop = Loop(Position(samples=64))
    with logging_to(RunLogger(RunDirectory(tmp_path), [written.append])) as logger:
        logger.follow(loop, is_first=True)  # type: ignore[arg-type]
        stoker.log(scalars={"gate": torch.tensor(0.5)})
        loop.reached = Position(samples=128)
        stoker.log(scalars={"gate": 0.25}, texts={"answer": "yes"})
        assert written == []
        logger(Event(kind="progress", at=1.0, fields={"samples": 128}))
        stoker.log(scalars={"gate": 1}, step=7)
    first, last = written
    assert first.fields["scalars"] == {"gate": [[64, 0.5], [128, 0.25]]}
    assert first.fields["texts"] == [{"name": "answer", "samples": 128, "text": "yes"}]
    assert last.fields == {"samples": 7, "scalars": {"gate": [[7, 1.0]]}}
    received = [(point.samples, point.values) for point in points_of(first)]
    assert received == [(64, {"gate": 0.5}), (128, {"gate": 0.25})]


@pytest.mark.parametrize(
    "image",
    [torch.rand(4, 6), torch.rand(3, 4, 6), np.zeros((4, 6, 3), dtype=np.uint8), torch.rand(1, 3000, 2)],
    ids=["grey", "channels first", "channels last", "large"],
)
def test_pictures_of_every_form_become_png(tmp_path: Path, image: object) -> None:
    """Tensors and arrays, channels first or last; large ones are thinned."""
    written: list[Event] = []
    with logging_to(RunLogger(RunDirectory(tmp_path), [written.append])):
        stoker.log(images={"a / b": image})
    [entry] = written[0].fields["images"]
    content = (tmp_path / "logged" / entry["file"]).read_bytes()
    assert content.startswith(b"\x89PNG")
    assert int.from_bytes(content[20:24], "big") <= 1024


def test_what_cannot_be_logged_is_named(tmp_path: Path) -> None:
    """A scalar of two numbers, a picture of four dimensions."""
    with logging_to(RunLogger(RunDirectory(tmp_path), [])):
        with pytest.raises(BadJob, match="'pair' is no number"):
            stoker.log(scalars={"pair": torch.zeros(2)})
        with pytest.raises(BadJob, match="'batch' has the shape"):
            stoker.log(images={"batch": torch.zeros(2, 3, 4, 4)})


def test_outside_of_a_run_and_in_other_processes_nothing_happens(tmp_path: Path) -> None:
    """A model that logs can be used anywhere."""
    stoker.log(scalars={"gate": 1.0})
    written: list[Event] = []
    loop = Loop(Position())
    with logging_to(RunLogger(RunDirectory(tmp_path), [written.append])) as logger:
        logger.follow(loop, is_first=False)  # type: ignore[arg-type]
        stoker.log(scalars={"gate": 1.0})
    assert written == []
