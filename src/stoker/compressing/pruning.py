"""Prune a run's model: smaller networks, each fast enough, trained with the whole one as teacher, and exported.

What is decided by measuring is stored in the run's directory before training, so that the same command, after an
interruption, continues with the same network and run.

How many channels go: each measurement builds a graph of the cut network and races it with the whole, so there should be
few. Speed grows about exponentially with the share that goes: the next share is interpolated between the nearest
measurements on either side, away from their ends. Measurements for one speed serve the next.
Source: regula falsi (Illinois variant), with noise: no measurement is trusted to better than a twentieth.
"""

from __future__ import annotations

import dataclasses
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
from stoker.store.run_files import PRUNING
from stoker.training.pruned_network import rebuild_pruned
from stoker.training.telemetry import Sink
from stoker.units import Duration

TARGETS = (1.25, 1.5, 2.0)
"""Speed-ups of pruned networks over the whole one [1]."""

_DECIDED = "pruned"
"""Folder of a run's directory with the decision for each speed."""

_RACE_S = 2.0
_MOST_PROBES = 5


def pruned_graphs(pruner: Pruner, aside: Path, *, until: Duration | None, sink: Sink | None) -> tuple[PrunedGraph, ...]:
    """Networks at the speeds of `TARGETS`, trained and exported into `aside`; failures are reported through `tell`.

    Args:
        pruner: see `pruner_of`.
        aside: an empty directory.
        until: length of each one's training; None: a quarter of the job's.
        sink: receives the events of their runs; None: a display on standard error.

    Raises:
        BadJob: the job's loss or step does not go with a teacher.
        RunFailed: training was stopped; the same command continues it.
    """
    until = until or share_of(pruner.prepared.job.until)
    graphs: list[PrunedGraph] = []
    try:
        chosen = decided(pruner, TARGETS, until, aside)
    except CannotPrune as error:
        pruner.tell(f"not pruned: {error.message}")
        return ()
    for pruning in chosen:
        name = f"pruned {pruning.target:g}×"
        pruner.tell(f"{name}: training what is left, {pruning.until}")
        run = trained(pruner.run, pruner.prepared.job, pruner.teacher, pruning, sink)
        directory = aside / f"{pruning.target:g}x"
        try:
            artifact = pruner.export(run.model(), directory / "model")
        except BadArtifact as error:
            pruner.tell(f"{name}: {error.message}")
            continue
        record = directory / PRUNING.name
        shutil.copyfile(run.path / PRUNING.name, record)
        how = f"{pruning.ratio:.0%} of channels out, trained on for {pruning.until} with the whole network as teacher"
        graphs.append(PrunedGraph(name, how, artifact.graph_path, record))
    return tuple(graphs)


def decided(pruner: Pruner, targets: Sequence[float], until: Duration, aside: Path) -> list[Pruning]:
    """The cut for each speed: as decided before under the same terms, or measured now and stored.

    Raises:
        CannotPrune: no channels can go.
    """
    kept = {target: _kept(pruner, target, until) for target in targets}
    missing = [target for target in targets if kept[target] is None]
    if missing:
        kept |= _measured(pruner, missing, until, aside)
    prunings = [pruning for target in targets if (pruning := kept[target]) is not None]
    return list({records.digest(pruning.cut): pruning for pruning in prunings}.values())  # one may serve several speeds


def _kept(pruner: Pruner, target: float, until: Duration) -> Pruning | None:
    """The stored decision, if it was made under the same terms."""
    try:
        pruning = records.loads(_path(pruner, target).read_text(encoding="utf-8"), Pruning)
    except (OSError, ValueError):
        return None
    terms = _undecided(pruner, target, until)
    undecided = dataclasses.replace(
        pruning, ratio=terms.ratio, speed_up=terms.speed_up, cut=terms.cut, importance=terms.importance
    )
    return pruning if undecided == terms else None


def _undecided(pruner: Pruner, target: float, until: Duration) -> Pruning:
    """A record of the terms only, without a decision."""
    terms = pruner.course.terms
    return Pruning(
        source=pruner.course.source.manifest.source,
        target=target,
        ratio=0.0,
        importance="taylor",
        speed_up=Interval(value=1.0, low=1.0, high=1.0),
        engine_precision=" ".join(pruner.runs_in),
        batch_sizes=terms.batch_sizes,
        threads=terms.threads,
        proved_on=pruner.proved_on,
        until=until,
        cut=Cut(kept=(), layers=()),
    )


def _path(pruner: Pruner, target: float) -> Path:
    return pruner.run.path / _DECIDED / f"{target:g}x.json"


def _measured(pruner: Pruner, targets: Sequence[float], until: Duration, aside: Path) -> dict[float, Pruning | None]:
    """Find the cut for each speed: build networks at a few shares and race them with the whole.

    Raises:
        CannotPrune: no channels can go.
    """
    pruner.tell("looking for channels that can go")
    scores = channel_scores(pruner, "taylor")
    cuts: dict[float, Cut] = {}
    measured: dict[float, Interval] = {}
    probes: list[RatioProbe] = []
    decisions: dict[float, Pruning | None] = {}
    for target in targets:
        for _ in range(_MOST_PROBES):
            ratio = next_ratio(probes, target)
            if ratio is None:
                break
            cuts[ratio] = sound_cut(pruner.teacher, pruner.ask, removed_at(scores, ratio))
            measured[ratio] = gain = _speed_up(pruner, cuts[ratio], aside / f"probe-{len(probes)}")
            pruner.tell(f"{ratio:.0%} of channels out: {gain.value:.2f}× as fast ({gain.low:.2f} to {gain.high:.2f})")
            probes.append(RatioProbe(ratio, gain.value))
        best = fast_enough(probes, target)
        decisions[target] = None
        if best is None:
            pruner.tell(f"{target:g}× is not to be had: {max(probe.speed_up for probe in probes):.2f}× at most")
            continue
        chosen = dataclasses.replace(
            _undecided(pruner, target, until), ratio=best.ratio, speed_up=measured[best.ratio], cut=cuts[best.ratio]
        )
        _path(pruner, target).parent.mkdir(exist_ok=True)
        write_atomic(_path(pruner, target), records.dumps(chosen) + "\n", what="what is pruned")
        decisions[target] = chosen
    return decisions


def _speed_up(pruner: Pruner, cut: Cut, directory: Path) -> Interval:
    """Speed-up of a pruned network over the whole one, in the engine and precision that it will be served in.

    Raises:
        CannotPrune: the engine or the exporter refuses it.
    """
    course, (engine, precision) = pruner.course, pruner.runs_in
    try:
        artifact = pruner.export(rebuild_pruned(pruner.teacher, cut), directory / "model")
        own, rival = (
            course.engine_of(dataclasses.replace(model.manifest, engine=engine, precision=precision), model.graph_path)
            for model in (artifact, course.source)
        )
    except StokerError as error:
        raise CannotPrune(f"the pruned network cannot be timed: {error.message}") from error
    gain = gain_of(course.races(own, rival, seconds=_RACE_S), course.terms.confidence)
    own.close()
    rival.close()
    return gain


LARGEST = 0.9
"""The largest share that is tried."""

CLOSE = 1.05
"""A network up to this factor faster than its target is taken."""

_NARROW = 0.02
_MARGIN = 0.2
"""Least distance of a new share from either measured one, relative to the distance between these."""


@dataclass(frozen=True)
class RatioProbe:
    """A share of channels to remove, and the measured speed-up over the whole network."""

    ratio: float
    speed_up: float


def next_ratio(probes: Sequence[RatioProbe], target: float) -> float | None:
    """The share [0 to 1] to measure next for a speed; None if a measured one will do, or none can.

    >>> next_ratio([], 1.5)
    0.5
    >>> next_ratio([RatioProbe(0.5, 1.52)], 1.5) is None
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
    """The measurement that removes the fewest channels and reaches the target."""
    return min((probe for probe in probes if probe.speed_up >= target), key=lambda probe: probe.ratio, default=None)
