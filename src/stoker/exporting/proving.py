"""Which engines compute what the model does: an export is checked in numbers, or it did not happen."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from stoker.artifacts import Golden
from stoker.artifacts.answers import scales_of
from stoker.artifacts.elements import Arrays
from stoker.engines import Graph, load_graph
from stoker.errors import BadArtifact
from stoker.exporting.checking import Answer, is_held, prove_alone, prove_equal, prove_padding
from stoker.exporting.trial import Trial
from stoker.records import EngineName, Proof, Tolerance

PREFERRED: tuple[EngineName, ...] = ("openvino", "onnxruntime")
"""The first that computes what the model does is the one that an export names."""

_FLOOR = 1e-4
"""Engines pick kernels by shape, and so differ between sizes that were not asked here."""
_ROOM = 10


@dataclass(frozen=True, kw_only=True)
class Proven:
    """The engine of an export, what was checked of every engine, and the golden answers of the one."""

    engine: EngineName
    proofs: tuple[Proof, ...]
    golden: Arrays
    tolerance: Tolerance


def prove(graph: Graph, oracle: Answer, oracle_name: str, trial: Trial, golden: Arrays, limit: float) -> Proven:
    """Check every engine against the oracle, and take the first that holds.

    Args:
        graph: what the engines load.
        oracle: what the model answers.
        oracle_name: what to call it.
        trial: samples to ask.
        golden: inputs whose answers are kept.
        limit: see `checking`.

    Raises:
        BadArtifact: none holds, or none is installed.
    """
    chosen: tuple[EngineName, Arrays, Tolerance] | None = None
    proofs: list[Proof] = []
    for name in PREFERRED:
        own, result = _examined(name, graph, oracle, oracle_name, trial, golden, limit)
        proofs += own
        if chosen is None and result is not None:
            chosen = name, *result
    if chosen is None:
        raise _nobody(graph, proofs)
    name, answers, tolerance = chosen
    return Proven(engine=name, proofs=tuple(proofs), golden=answers, tolerance=tolerance)


def _examined(
    name: EngineName, graph: Graph, oracle: Answer, oracle_name: str, trial: Trial, golden: Arrays, limit: float
) -> tuple[tuple[Proof, ...], tuple[Arrays, Tolerance] | None]:
    """What was checked of one engine; its golden answers and their tolerance, if all of it holds."""
    try:
        (engine,) = load_graph(name, graph)
    except BadArtifact as error:
        said = error.message.replace(str(graph.path), graph.path.name)  # the directory is about to be renamed
        return (Proof(what=said, error=math.inf, limit=limit),), None
    try:
        who = name if name == oracle_name else f"{name} and {oracle_name}"
        proofs = [prove_equal(who, engine.run, oracle, trial, limit)]
        if trial.is_batched:
            proofs.append(prove_alone(name, engine.run, trial, limit))
        if trial.sizes and any(spec.pad is not None for spec in graph.inputs):
            proofs.append(prove_padding(name, engine.run, trial.with_inputs(graph.inputs), graph.outputs, limit))
        if not all(map(is_held, proofs)):
            return tuple(proofs), None
        answers = engine.run(golden)
        tolerance = tolerance_of(proofs, answers, limit)
        if trial.is_batched:
            proofs.append(_as_served(name, engine.run, Golden(golden, answers), tolerance, trial.served_sizes))
        return tuple(proofs), (answers, tolerance) if is_held(proofs[-1]) else None
    finally:
        engine.close()


def tolerance_of(proofs: Sequence[Proof], answers: Arrays, limit: float) -> Tolerance:
    """What later answers may differ by: ten times what was measured, not below a floor nor above what was allowed.

    The absolute part covers elements near zero as well: it is that share of the largest answer. Of several outputs it
    is of the one with the smallest numbers, so that boxes of 640 pixels allow nothing to scores below 1; of the others
    it covers ten times what was measured.
    """
    measured = min(_ROOM * max(proof.error for proof in proofs), max(limit, _FLOOR))
    share, scales = max(_FLOOR, measured), [scale for scale in scales_of(answers) if scale > 0] or [1.0]
    return Tolerance(absolute=max(share * min(scales), measured * max(scales)), relative=share)


def _as_served(name: EngineName, answer: Answer, golden: Golden, tolerance: Tolerance, sizes: Sequence[int]) -> Proof:
    """That the golden answers hold in every batch that is served: a server refuses the version otherwise."""
    what = f"{name}: golden answers among {', '.join(map(str, sizes))}, as a share of the tolerance"
    return Proof(what=what, error=golden.excess_in_batches(answer, tolerance, sizes), limit=1.0)


def _nobody(graph: Graph, proofs: Sequence[Proof]) -> BadArtifact:
    failed = [proof for proof in proofs if not is_held(proof)]
    listed = "\n".join(f"  {proof.what}: {proof.error:.2g}, at most {proof.limit:g}" for proof in failed)
    return BadArtifact(
        f"The graph {graph.path.name} does not compute what the model does, so nothing was exported:\n{listed}",
        remedy="What fixes a size, or depends on values, in `forward` is the usual cause; the first line says where.",
    )
