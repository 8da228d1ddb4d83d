"""Sending runs to trackers: while they train, or afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from stoker.errors import RunFailed, StokerError
from stoker.records import Event
from stoker.store import RunDirectory, find_run, runs_root
from stoker.tracking import Following, Shipment, Target, target_of


@dataclass(frozen=True)
class Sent:
    """What was sent of a run: so many events, and where people find it there."""

    run: str
    tracker: str
    events: int
    where: str


@contextmanager
def tracked(
    directory: RunDirectory, targets: Sequence[Target], tell: Callable[[str], None]
) -> Iterator[tuple[Callable[[Event], None], ...]]:
    """Within the block, what events are to be given to so that trackers follow a run; afterwards they have them all."""
    if not targets:
        yield ()
        return
    following = Following([Shipment(directory, one.word, one.open) for one in targets], tell)
    try:
        yield (following,)
    finally:
        following.close()


def track(run: str, to: str) -> Sent:
    """Send what a tracker does not have yet of a run, which may be over.

    Args:
        run: its name, the start of one, `latest`, or a path.
        to: a tracker: `tensorboard`, `mlflow=http://host:5000`, `wandb=project`, `trackio`, `csv`.

    Raises:
        BadJob: there is no such tracker, or its package is missing.
        BadRun: there is no such run, or it cannot be read.
        RunFailed: the tracker did not take it; the same call goes on.
    """
    target, directory = target_of(to), find_run(runs_root(), run)
    shipment = Shipment(directory, target.word, target.open)
    try:
        events = shipment.send()
        shipment.close()
    except StokerError:
        raise
    except Exception as problem:
        raise RunFailed(
            f"{target.name} did not take the run: {type(problem).__name__}: {problem}",
            remedy="Nothing is lost; the same command sends what is left.",
        ) from problem
    return Sent(directory.name, target.name, events, shipment.where or "")
