"""Prune: from a run to smaller networks that answer as its model does, each fast enough and trained on beside it.

What was decided by measuring is kept in the run's directory before anything is trained, so that the same command, after
an interruption, goes on with the same network and the same run.

At which share of channels a network is as fast as was asked for: a search that measures little.

What: each measurement makes a graph of the cut network and races it with the whole, so there shall be few. Speed grows
with the share that goes, about as the exponential of it: the next share is read off the line between the nearest
measurements on either side, kept away from their ends. Measurements made for one speed serve the next.
Source: the Illinois variant of regula falsi is the same idea without noise; what was measured is never believed here to
more than a twentieth.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from stoker import records
from stoker.compressing.candidates import PrunedGraph
from stoker.compressing.channel_cuts import CannotPrune, sound_cut
from stoker.compressing.channel_importance import removed_at
from stoker.compressing.contender import gain_of
from stoker.compressing.distillation import share_of, trained
from stoker.compressing.source_job import Pruner, channel_scores
from stoker.errors import BadArtifact, StokerError
from stoker.records.compression import Cut, Interval, Pruning
from stoker.store import write_atomic
from stoker.training.pruned_network import rebuild_pruned
from stoker.training.run_handle import PRUNING
from stoker.training.telemetry import Sink
from stoker.units import Duration

TARGETS = (1.25, 1.5, 2.0)
"""How much faster than the whole network pruned ones shall be."""

_DECIDED = "pruned"
"""Where a run's directory keeps what was decided about each speed."""

_RACE_S = 2.0
_MOST_PROBES = 5


def pruned_graphs(pruner: Pruner, aside: Path, *, until: Duration | None, sink: Sink | None) -> tuple[PrunedGraph, ...]:
    """Networks at the speeds of `TARGETS`, trained on and exported into `aside`; those that cannot be had are told of.

    Args:
        pruner: see `pruner_of`.
        aside: an empty directory.
        until: how long each is trained; None: a quarter of what the job's run was.
        sink: receives the events of their runs; None: a display on standard error.

    Raises:
        BadJob: the job's loss or step does not go with a teacher.
        RunFailed: training was stopped: the same command goes on.
    """
    until = until or share_of(pruner.prepared.job.until)
    found: list[PrunedGraph] = []
    try:
        chosen = decided(pruner, TARGETS, until, aside)
    except CannotPrune as error:
        pruner.tell(f"not pruned: {error.message}")
        return ()
    for pruning in chosen:
        pruner.tell(f"{_name(pruning)}: training what is left, {pruning.until}")
        run = trained(pruner.run, pruner.prepared.job, pruner.teacher, pruning, sink)
        directory = aside / f"{pruning.target:g}x"
        try:
            artifact = pruner.export(run.model(), directory / "model")
        except BadArtifact as error:
            pruner.tell(f"{_name(pruning)}: {error.message}")
            continue
        record = directory / PRUNING
        shutil.copyfile(run.path / PRUNING, record)
        found.append(PrunedGraph(_name(pruning), _how(pruning), artifact.graph_path, record))
    return tuple(found)


def decided(pruner: Pruner, targets: Sequence[float], until: Duration, aside: Path) -> list[Pruning]:
    """What to cut for each speed: as decided before under the same terms, or measured now and kept.

    Raises:
        CannotPrune: no channels can go.
    """
    kept = {target: _kept(pruner, target, until) for target in targets}
    missing = [target for target in targets if kept[target] is None]
    if missing:
        kept |= _measured(pruner, missing, until, aside)
    found = {records.digest(one.cut): one for target in targets if (one := kept[target]) is not None}
    return list(found.values())  # one network may be fast enough for several speeds


def _kept(pruner: Pruner, target: float, until: Duration) -> Pruning | None:
    path = _place(pruner, target)
    try:
        pruning = records.loads(path.read_text(encoding="utf-8"), Pruning)
    except (OSError, ValueError):
        return None
    wanted = _undecided(pruner, target, until)
    undecided = dataclasses.replace(
        pruning, ratio=wanted.ratio, speed_up=wanted.speed_up, cut=wanted.cut, importance=wanted.importance
    )
    return pruning if undecided == wanted else None


def _undecided(pruner: Pruner, target: float, until: Duration) -> Pruning:
    """A record without its decision: the terms it is made under."""
    terms = pruner.course.terms
    return Pruning(
        source=pruner.course.source.manifest.source, target=target, ratio=0.0, importance="taylor",
        speed_up=Interval(value=1.0, low=1.0, high=1.0), engine_precision=" ".join(pruner.runs_in),
        batch_sizes=terms.batch_sizes, threads=terms.threads, proved_on=pruner.proved_on, until=until,
        cut=Cut(kept=(), layers=()),
    )  # fmt: skip


def _place(pruner: Pruner, target: float) -> Path:
    return pruner.run.path / _DECIDED / f"{target:g}x.json"


def _measured(pruner: Pruner, targets: Sequence[float], until: Duration, aside: Path) -> dict[float, Pruning | None]:
    """The cut for each speed, by making graphs of networks at a few shares and racing them with the whole.

    Raises:
        CannotPrune: no channels can go.
    """
    pruner.tell("looking for channels that can go")
    scores = channel_scores(pruner, "taylor")
    cuts: dict[float, Cut] = {}
    measured: dict[float, Interval] = {}
    numbers = itertools.count()

    def probe(ratio: float) -> RatioProbe:
        cuts[ratio] = sound_cut(pruner.teacher, pruner.ask, removed_at(scores, ratio))
        measured[ratio] = _speed_up(pruner, cuts[ratio], aside / f"probe-{next(numbers)}")
        gain = measured[ratio]
        pruner.tell(f"{ratio:.0%} of channels out: {gain.value:.2f}× as fast ({gain.low:.2f} to {gain.high:.2f})")
        return RatioProbe(ratio, gain.value)

    probes: list[RatioProbe] = []
    found: dict[float, Pruning | None] = {}
    for target in targets:
        for _ in range(_MOST_PROBES):
            ratio = next_ratio(probes, target)
            if ratio is None:
                break
            probes.append(probe(ratio))
        best = fast_enough(probes, target)
        found[target] = None
        if best is None:
            pruner.tell(f"{target:g}× is not to be had: {max(one.speed_up for one in probes):.2f}× at most")
            continue
        chosen = dataclasses.replace(
            _undecided(pruner, target, until), ratio=best.ratio, speed_up=measured[best.ratio], cut=cuts[best.ratio]
        )
        _place(pruner, target).parent.mkdir(exist_ok=True)
        write_atomic(_place(pruner, target), records.dumps(chosen) + "\n", what="what is pruned")
        found[target] = chosen
    return found


def _speed_up(pruner: Pruner, cut: Cut, directory: Path) -> Interval:
    """How much faster than the whole network what is left of it is, in the engine and precision it will be served in.

    Raises:
        CannotPrune: the engine or the exporter refuses it.
    """
    course, (engine, precision) = pruner.course, pruner.runs_in
    try:
        artifact = pruner.export(rebuild_pruned(pruner.teacher, cut), directory / "model")
        pair = [
            course.engine_of(dataclasses.replace(one.manifest, engine=engine, precision=precision), one.graph_path)
            for one in (artifact, course.source)
        ]
    except StokerError as error:
        raise CannotPrune(f"the pruned network cannot be timed: {error.message}") from error
    gain = gain_of(course.races(pair[0], pair[1], seconds=_RACE_S), course.terms.confidence)
    for one in pair:
        one.close()
    return gain


def _name(pruning: Pruning) -> str:
    return f"pruned {pruning.target:g}×"


def _how(pruning: Pruning) -> str:
    return f"{pruning.ratio:.0%} of channels out, trained on for {pruning.until} with the whole network as teacher"


LARGEST = 0.9
"""The largest share that is tried."""

CLOSE = 1.05
"""A network that is up to so many times faster than was asked for is taken."""

_NARROW = 0.02
_MARGIN = 0.2
"""A share is tried no nearer to what was measured than this, of the distance between the two."""


@dataclass(frozen=True)
class RatioProbe:
    """A share of channels that were to go, and how much faster than the whole network the rest was."""

    ratio: float
    speed_up: float


def next_ratio(probes: Sequence[RatioProbe], target: float) -> float | None:
    """The share to measure next on the way to a speed; None where what was measured will do, or nothing can.

    >>> next_ratio([], 1.5)
    0.5
    >>> next_ratio([Probe(0.5, 1.52)], 1.5) is None
    True
    """
    if not probes:
        return 0.5
    best = fast_enough(probes, target)
    if best is None:
        furthest = max(probe.ratio for probe in probes)
        return None if furthest >= LARGEST else min(LARGEST, (furthest + LARGEST) / 2 + 0.05)
    slower = [probe for probe in probes if probe.ratio < best.ratio]
    below = max(slower, key=lambda probe: probe.ratio, default=RatioProbe(0.0, 1.0))
    if best.speed_up <= CLOSE * target or best.ratio - below.ratio < _NARROW:
        return None
    low, high = math.log(min(below.speed_up, target)), math.log(best.speed_up)
    share = (math.log(target) - low) / (high - low)
    return below.ratio + (best.ratio - below.ratio) * min(max(share + 0.05, _MARGIN), 1 - _MARGIN)


def fast_enough(probes: Sequence[RatioProbe], target: float) -> RatioProbe | None:
    """The measurement that takes the fewest channels to be as fast as was asked for."""
    return min((probe for probe in probes if probe.speed_up >= target), key=lambda probe: probe.ratio, default=None)
