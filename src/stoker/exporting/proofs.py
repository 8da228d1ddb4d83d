"""Which engines compute what the model does: an export is checked in numbers, or it did not happen.

Holding an exported model against what it came from, in numbers.

Errors are the largest difference of any element, as a share of its output's largest value (`artifacts.difference`).
What cannot be asked at all is infinitely far.

What an export is tried with: eight samples, and the forms in which they are asked.

What inputs can be filled up with, so that samples of several sizes share a batch: proposed by name, then verified.

The names are those of the tokenizers and models of the transformers library: `attention_mask` is 1 for a token and 0
for what is to be passed over; what the other inputs hold there is then without effect.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from stoker.artifacts import Golden, difference, served_sizes
from stoker.artifacts.dtypes import Arrays
from stoker.artifacts.golden import cut, filled, has_nan, num_rows, output_scales, rows, sizes_of, stacked
from stoker.engines import Graph, engine_records, load_graph
from stoker.errors import BadArtifact, ServiceError
from stoker.records import BATCH, DynamicDim, EngineName, Proof, ServiceSettings, TensorSpec, Tolerance

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
    for name in (record.name for record in engine_records()):
        own, result = _examined(name, graph, oracle, oracle_name, trial, golden, limit)
        proofs += own
        if chosen is None and result is not None:
            chosen = name, *result
    if chosen is None:
        raise _no_engine_agrees(graph, proofs)
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
    share, scales = max(_FLOOR, measured), [scale for scale in output_scales(answers) if scale > 0] or [1.0]
    return Tolerance(absolute=max(share * min(scales), measured * max(scales)), relative=share)


def _as_served(name: EngineName, answer: Answer, golden: Golden, tolerance: Tolerance, sizes: Sequence[int]) -> Proof:
    """That the golden answers hold in every batch that is served: a server refuses the version otherwise."""
    what = f"{name}: golden answers among {', '.join(map(str, sizes))}, as a share of the tolerance"
    return Proof(what=what, error=golden.excess_in_batches(answer, tolerance, sizes), limit=1.0)


def _no_engine_agrees(graph: Graph, proofs: Sequence[Proof]) -> BadArtifact:
    failed = [proof for proof in proofs if not is_held(proof)]
    listed = "\n".join(f"  {proof.what}: {proof.error:.2g}, at most {proof.limit:g}" for proof in failed)
    return BadArtifact(
        f"The graph {graph.path.name} does not compute what the model does, so nothing was exported:\n{listed}",
        remedy="What fixes a size, or depends on values, in `forward` is the usual cause; the first line says where.",
    )


LIMIT = 1e-3
"""The most that answers may differ. Those of MiniLM and five small networks, in fp32, differed by 1.2e-6."""

Answer = Callable[[Arrays], Arrays]
"""Whatever answers: an engine's `run`."""


def prove_equal(who: str, answer: Answer, oracle: Answer, trial: Trial, limit: float = LIMIT) -> Proof:
    """That it answers as the oracle does, at every size of batch."""
    asked = list(trial.requests())
    errors = [(words, _difference(answer, request, partial(oracle, request))) for words, request in asked]
    return _worst(f"{who}, {'; '.join(words for words, _ in asked)}", errors, limit)


def prove_alone(
    who: str, answer: Answer, trial: Trial, limit: float = LIMIT, sizes: Sequence[int] | None = None
) -> Proof:
    """That every sample has the same answer alone as in batches of these sizes, by default those that are served."""
    sizes = tuple(size for size in (trial.served_sizes if sizes is None else sizes) if size > 1)
    count = num_rows(trial.samples)
    orders = [[at % count for at in range(size)] for size in sizes]
    what = f"{who}: each sample alone and among {', '.join(map(str, sizes))}"
    try:
        each = [answer(rows(trial.samples, slice(at, at + 1))) for at in range(min(count, max(sizes, default=1)))]
    except ServiceError as error:
        return Proof(what=f"{what}: {error.message}", error=math.inf, limit=limit)
    if stray := next((name for one in each for name, array in one.items() if array.shape[:1] != (1,)), None):
        return Proof(what=f"{what}: {stray!r} does not begin with the samples", error=math.inf, limit=limit)
    alone = stacked(each)
    errors = [
        (f"among {len(order)}", _difference(answer, rows(trial.samples, order), partial(rows, alone, order)))
        for order in orders
    ]
    return _worst(what, errors, limit)


def prove_padding(who: str, answer: Answer, trial: Trial, outputs: Iterable[TensorSpec], limit: float = LIMIT) -> Proof:
    """That a sample which is filled up, to share a batch with a longer one, has the answer that it has alone."""
    specs = tuple(outputs)
    short = rows(cut(trial.samples, trial.inputs, trial.shorter), slice(1))
    long = rows(trial.samples, slice(1, 2))
    shared = stacked([filled(short, trial.inputs, trial.sizes), long])

    def cut_back(request: Arrays) -> Arrays:
        return cut(rows(answer(request), slice(1)), specs, trial.shorter)

    sizes = ", ".join(f"{dim} {trial.shorter[dim]} in {size}" for dim, size in trial.sizes.items())
    return _worst(f"{who}: padded ({sizes})", [("", _difference(cut_back, shared, lambda: answer(short)))], limit)


def is_held(proof: Proof) -> bool:
    """Whether what was checked holds."""
    return proof.error <= proof.limit


def _difference(answer: Answer, request: Arrays, wanted: Callable[[], Arrays]) -> tuple[float, str]:
    """How far the answer is from what is wanted, and why where no number says it."""
    try:
        found, right = answer(request), wanted()
    except ServiceError as error:
        return math.inf, error.message
    if has_nan(found):
        return math.inf, "the answer has NaN"
    return difference(found, right), ""


def _worst(what: str, errors: Iterable[tuple[str, tuple[float, str]]], limit: float) -> Proof:
    """One proof of several errors; where it does not hold, with the request that was worst, and the reason."""
    at, (error, why) = max(errors, key=lambda one: one[1][0])
    reason = ": ".join(filter(None, (what, *((at, why) if error > limit else ()))))
    return Proof(what=reason, error=error, limit=limit)


NUM_SAMPLES = 8
_FEWEST = 2
BATCH_SIZES = (1, 3, 8)
"""Samples asked at once, in turn: one, an odd number, and all."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """Samples to ask a model about, and what it takes; without a batch they are one request, asked as it is.

    `most_rows` is the largest batch that the model will be served in.
    """

    samples: Arrays
    inputs: tuple[TensorSpec, ...]
    dims: tuple[DynamicDim, ...] = ()
    most_rows: int = ServiceSettings.max_batch_rows

    @property
    def served_sizes(self) -> tuple[int, ...]:
        """Batch sizes [rows] that answers are compared at with each sample alone; without a batch none."""
        return served_sizes(max(self.most_rows, NUM_SAMPLES)) if self.is_batched else ()

    @property
    def is_batched(self) -> bool:
        """Whether samples can be asked one by one."""
        return all(spec.shape[:1] == (BATCH,) for spec in self.inputs)

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes of named dimensions, the batch aside, in these samples."""
        return {dim: size for dim, size in sizes_of(self.samples, self.inputs).items() if dim != BATCH}

    @property
    def shorter(self) -> dict[str, int]:
        """Other sizes that they can be cut to: half, or as little as is allowed."""
        lows = {dim.name: dim.low for dim in self.dims}
        return {dim: max(lows.get(dim, 1), size // 2) for dim, size in self.sizes.items()}

    def requests(self) -> Iterator[tuple[str, Arrays]]:
        """Requests of 1, 3 and 8 samples, the middle one of other sizes; each with what it is, in words."""
        if not self.is_batched:
            yield "one request", self.samples
            if self.sizes:
                yield f"another ({_listed(self.shorter)})", cut(self.samples, self.inputs, self.shorter)
            return
        for count in BATCH_SIZES:
            request = rows(self.samples, slice(count))
            if count == BATCH_SIZES[1]:
                request = cut(request, self.inputs, self.shorter)
            sizes = {dim: size for dim, size in sizes_of(request, self.inputs).items() if dim != BATCH}
            yield f"{count} sample{'s' * (count > 1)}{f' ({_listed(sizes)})' * bool(sizes)}", request

    def with_inputs(self, inputs: tuple[TensorSpec, ...]) -> Trial:
        """The same samples for a model that takes this."""
        return dataclasses.replace(self, inputs=inputs)


def eight_samples(samples: Arrays) -> Arrays:
    """Eight samples: the first ones, or all of them in turn where there are fewer.

    Raises:
        BadArtifact: there are not two, so that one that looks at its neighbours would see itself alone; or the inputs
            have different numbers of them.
    """
    counts = {name: len(array) if array.ndim else 0 for name, array in samples.items()}
    if len(set(counts.values())) != 1 or min(counts.values()) < _FEWEST:
        listed = ", ".join(f"{name}: {count}" for name, count in counts.items())
        raise BadArtifact(
            f"The example inputs have no common number of samples, two or more ({listed})",
            remedy="Give inputs whose first dimension is the samples.",
        )
    count = num_rows(samples)
    return rows(samples, list(itertools.islice(itertools.cycle(range(count)), NUM_SAMPLES)))


def _listed(sizes: dict[str, int]) -> str:
    return ", ".join(f"{dim} {size}" for dim, size in sizes.items())


def contiguous(samples: Arrays) -> Arrays:
    """The same content in arrays of their own, as engines read them in place."""
    return {name: np.array(array, order="C") for name, array in samples.items()}


_MASKS = ("attention_mask", "input_mask", "mask", "padding_mask")


def padded_specs(
    who: str,
    answer: Answer,
    trial: Trial,
    outputs: tuple[TensorSpec, ...],
    given: Mapping[str, float] | None,
    limit: float,
) -> tuple[tuple[TensorSpec, ...], tuple[Proof, ...]]:
    """The inputs with what they are filled up with, where that changes no answer; and the proof.

    Args:
        who: who answers, for the proof.
        answer: the model as it was before the export.
        trial: samples to ask.
        outputs: what it gives.
        given: what the user says about filling up, by input; None: a mask among the inputs proposes 0 for all.
        limit: see `checking`.

    Raises:
        BadArtifact: what the user said changes the answers.
    """
    proposal = _proposal(trial.inputs) if given is None else dict(given)
    if not proposal or not trial.sizes:
        return trial.inputs, ()
    specs = tuple(dataclasses.replace(spec, pad=proposal.get(spec.name)) for spec in trial.inputs)
    proof = prove_padding(who, answer, trial.with_inputs(specs), outputs, limit)
    if is_held(proof):
        return specs, (proof,)
    if given is not None:
        raise BadArtifact(
            f"Filling up with {dict(given)} changes answers: {proof.what}: {proof.error:.2g}, at most {limit:g}",
            remedy="Leave `pad` out: samples of one size then share a batch.",
        )
    return trial.inputs, ()


def _proposal(inputs: tuple[TensorSpec, ...]) -> dict[str, float]:
    masked = {dim for spec in inputs if spec.name in _MASKS for dim in spec.shape if isinstance(dim, str)} - {BATCH}
    return {spec.name: 0 for spec in inputs if masked & set(spec.shape) and spec.datatype != "BYTES"}
