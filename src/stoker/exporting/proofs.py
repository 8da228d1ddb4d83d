"""Prove in numbers that an engine computes what the original model does; nothing is exported otherwise.

Eight samples are asked together, alone, in every served batch size and, where that is possible, cut shorter and padded.
Errors are the largest difference of any element relative to its output's largest value (`artifacts.difference`);
infinite where there is no answer. Padding values are proposed from the input names of the transformers library
(`attention_mask` is 0 for tokens to ignore), then proved.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from stoker.activity import doing
from stoker.artifacts import Golden, difference, served_sizes
from stoker.artifacts.dtypes import Arrays
from stoker.artifacts.golden import cut, filled, has_nan, num_rows, output_scales, rows, sizes_of, stacked
from stoker.engines import Graph, engine_records, load_graph
from stoker.engines.base import EngineMissing
from stoker.errors import BadArtifact, ServiceError
from stoker.records import BATCH, DynamicDim, EngineName, Proof, ServiceSettings, TensorSpec, Tolerance

_FLOOR = 1e-4
"""Smallest relative tolerance: engines choose kernels by shape, so answers differ at sizes that were not tried here."""
_ROOM = 10
"""The tolerance is this many times the measured error."""


@dataclass(frozen=True, kw_only=True)
class Proven:
    """The chosen engine with its golden answers, and the proofs of every engine."""

    engine: EngineName
    proofs: tuple[Proof, ...]
    golden: Arrays
    tolerance: Tolerance


def prove(
    graph: Graph, oracle: Answer, oracle_name: str, trial: Trial, golden: Arrays, limit: float, *, remedy: str = ""
) -> Proven:
    """Check every engine against the oracle, and choose the first that agrees.

    Args:
        graph: loaded by the engines.
        oracle: answers as the original model.
        oracle_name: for the proofs.
        trial: samples to ask.
        golden: inputs whose answers are kept.
        limit: largest allowed error, relative to the largest value of an output.
        remedy: what to do if no engine agrees, where more is known than the usual cause.

    Raises:
        BadArtifact: no engine agrees, or none is installed.
    """
    chosen: tuple[EngineName, Arrays, Tolerance] | None = None
    proofs: list[Proof] = []
    missing: list[EngineMissing] = []
    names = [record.name for record in engine_records()]
    for name in names:
        with doing(f"checking {name}"):
            try:
                own, result = _examined(name, graph, oracle, oracle_name, trial, golden, limit)
            except EngineMissing as error:
                missing.append(error)
                own, result = (Proof(what=error.message, error=math.inf, limit=limit),), None
        proofs += own
        if chosen is None and result is not None:
            chosen = name, *result
    if len(missing) == len(names):
        listed = ", ".join(names)
        raise BadArtifact(f"No engine to check the graph is installed here, of {listed}", remedy=missing[0].remedy)
    if chosen is None:
        failed = [proof for proof in proofs if not is_held(proof)]
        listed = "\n".join(f"  {proof.what}: {proof.error:.2g}, at most {proof.limit:g}" for proof in failed)
        raise BadArtifact(
            f"The graph {graph.path.name} does not compute what the model does, so nothing was exported:\n{listed}",
            remedy=remedy
            or "What fixes a size, or depends on values, in `forward` is the usual cause; the first line says where.",
        )
    name, answers, tolerance = chosen
    return Proven(engine=name, proofs=tuple(proofs), golden=answers, tolerance=tolerance)


def _examined(
    name: EngineName, graph: Graph, oracle: Answer, oracle_name: str, trial: Trial, golden: Arrays, limit: float
) -> tuple[tuple[Proof, ...], tuple[Arrays, Tolerance] | None]:
    """One engine's proofs; its golden answers and their tolerance, if every proof holds."""
    try:
        (engine,) = load_graph(name, graph)
    except EngineMissing:
        raise
    except BadArtifact as error:
        message = error.message.replace(str(graph.path), graph.path.name)  # the directory is about to be renamed
        return (Proof(what=message, error=math.inf, limit=limit),), None
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
            # A server refuses a version whose golden answers do not hold in every batch size that it serves.
            sizes = trial.served_sizes
            what = f"{name}: golden answers among {', '.join(map(str, sizes))}, as a share of the tolerance"
            share = Golden(golden, answers).excess_in_batches(engine.run, tolerance, sizes)
            proofs.append(Proof(what=what, error=share, limit=1.0))
        return tuple(proofs), (answers, tolerance) if is_held(proofs[-1]) else None
    finally:
        engine.close()


def tolerance_of(proofs: Sequence[Proof], answers: Arrays, limit: float) -> Tolerance:
    """Allowed difference of later answers: ten times the measured error, at least a floor, at most `limit`.

    The absolute part is that share of the largest answer, so that it covers elements near zero. Of several outputs the
    one with the smallest values counts (a tolerance in 640-pixel boxes would accept any score below 1), but no output
    gets less than ten times its measured error.
    """
    measured = min(_ROOM * max(proof.error for proof in proofs), max(limit, _FLOOR))
    share, scales = max(_FLOOR, measured), [scale for scale in output_scales(answers) if scale > 0] or [1.0]
    return Tolerance(absolute=max(share * min(scales), measured * max(scales)), relative=share)


LIMIT = 1e-3
"""Largest allowed relative error. MiniLM and five small networks, in fp32, had 1.2e-6."""

Answer = Callable[[Arrays], Arrays]
"""Outputs for inputs, such as an engine's `run`."""


def prove_equal(who: str, answer: Answer, oracle: Answer, trial: Trial, limit: float = LIMIT) -> Proof:
    """Prove that an engine answers as the oracle does, in 1, 3 and 8 samples."""
    errors = [(text, _difference(answer, request, partial(oracle, request))) for text, request in trial.requests()]
    return _worst(f"{who}, {'; '.join(text for text, _ in errors)}", errors, limit)


def prove_alone(
    who: str, answer: Answer, trial: Trial, limit: float = LIMIT, sizes: Sequence[int] | None = None
) -> Proof:
    """Prove that each sample has the same answer alone as in batches of these sizes (default: the served ones)."""
    sizes = tuple(size for size in (trial.served_sizes if sizes is None else sizes) if size > 1)
    count = num_rows(trial.samples)
    what = f"{who}: each sample alone and among {', '.join(map(str, sizes))}"
    try:
        each = [answer(rows(trial.samples, slice(row, row + 1))) for row in range(min(count, max(sizes, default=1)))]
    except ServiceError as error:
        return Proof(what=f"{what}: {error.message}", error=math.inf, limit=limit)
    if stray := next((name for outputs in each for name, array in outputs.items() if array.shape[:1] != (1,)), None):
        return Proof(what=f"{what}: {stray!r} does not begin with the samples", error=math.inf, limit=limit)
    alone, errors = stacked(each), list[tuple[str, tuple[float, str]]]()
    for size in sizes:
        order = [row % count for row in range(size)]
        expected = partial(rows, alone, order)
        errors.append((f"among {size}", _difference(answer, rows(trial.samples, order), expected)))
    return _worst(what, errors, limit)


def prove_padding(who: str, answer: Answer, trial: Trial, outputs: Iterable[TensorSpec], limit: float = LIMIT) -> Proof:
    """Prove that a sample padded to share a batch with a longer one has the same answer as alone."""
    specs = tuple(outputs)
    short = rows(trial.cut(trial.samples), slice(1))
    long = rows(trial.samples, slice(1, 2))
    shared = stacked([filled(short, trial.inputs, trial.sizes), long])

    def cut_back(request: Arrays) -> Arrays:
        return cut(rows(answer(request), slice(1)), specs, trial.shorter)

    sizes = ", ".join(f"{dim} {trial.shorter[dim]} in {size}" for dim, size in trial.sizes.items())
    return _worst(f"{who}: padded ({sizes})", [("", _difference(cut_back, shared, lambda: answer(short)))], limit)


def is_held(proof: Proof) -> bool:
    """Whether the error is within the limit."""
    return proof.error <= proof.limit


def _difference(answer: Answer, request: Arrays, expected: Callable[[], Arrays]) -> tuple[float, str]:
    """The answer's relative error [1]; the reason where it is infinite."""
    try:
        result, correct = answer(request), expected()
    except ServiceError as error:
        return math.inf, error.message
    if has_nan(result):
        return math.inf, "the answer has NaN"
    return difference(result, correct), ""


def _worst(what: str, errors: Iterable[tuple[str, tuple[float, str]]], limit: float) -> Proof:
    """One proof of the largest of several errors; if it fails, with the worst request and the reason."""
    request, (error, reason) = max(errors, key=lambda item: item[1][0])
    if error > limit:
        what = ": ".join(filter(None, (what, request, reason)))
    return Proof(what=what, error=error, limit=limit)


NUM_SAMPLES = 8
_FEWEST = 2
BATCH_SIZES = (1, 3, 8)
"""Samples asked at once, in turn: one, an odd number, and all."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """Samples and the signature to ask them by; without a batch they are one request.

    `most_rows` is the largest batch [rows] that the model will be served in. `lengths` are inputs that say how many
    positions of a sample count: where samples are cut, they are lowered.
    """

    samples: Arrays
    inputs: tuple[TensorSpec, ...]
    dims: tuple[DynamicDim, ...] = ()
    most_rows: int = ServiceSettings.max_batch_rows
    lengths: tuple[str, ...] = ()

    @property
    def served_sizes(self) -> tuple[int, ...]:
        """Batch sizes [rows] at which answers are compared with each sample alone; none without a batch."""
        return served_sizes(max(self.most_rows, NUM_SAMPLES)) if self.is_batched else ()

    @property
    def is_batched(self) -> bool:
        """Whether every input begins with the batch."""
        return all(spec.shape[:1] == (BATCH,) for spec in self.inputs)

    @property
    def sizes(self) -> dict[str, int]:
        """Sizes of the named dimensions in these samples, without the batch."""
        return {dim: size for dim, size in sizes_of(self.samples, self.inputs).items() if dim != BATCH}

    @property
    def shorter(self) -> dict[str, int]:
        """Smaller sizes to cut them to: half, or the least allowed."""
        lows = {dim.name: dim.low for dim in self.dims}
        return {dim: max(lows.get(dim, 1), size // 2) for dim, size in self.sizes.items()}

    def cut(self, samples: Arrays) -> Arrays:
        """Samples cut to the smaller sizes."""
        shorter = cut(samples, self.inputs, self.shorter)
        for name in self.lengths:
            most = np.array(min(self.shorter.values()), shorter[name].dtype)
            shorter[name] = np.minimum(shorter[name], most)
        return shorter

    def requests(self) -> Iterator[tuple[str, Arrays]]:
        """Requests of 1, 3 and 8 samples, the second cut to other sizes; each with its description."""
        if not self.is_batched:
            yield "one request", self.samples
            if self.sizes:
                yield f"another ({_listed(self.shorter)})", self.cut(self.samples)
            return
        for count in BATCH_SIZES:
            request = rows(self.samples, slice(count))
            if count == BATCH_SIZES[1]:
                request = self.cut(request)
            sizes = {dim: size for dim, size in sizes_of(request, self.inputs).items() if dim != BATCH}
            yield f"{count} sample{'s' * (count > 1)}{f' ({_listed(sizes)})' * bool(sizes)}", request

    def with_inputs(self, inputs: tuple[TensorSpec, ...]) -> Trial:
        """The same samples with another signature."""
        return dataclasses.replace(self, inputs=inputs)


def with_lengths(trial: Trial, answer: Answer) -> Trial:
    """The trial with its `lengths`: whole numbers, one a sample, without whose lowering cut samples have no answer.

    Raises:
        BadArtifact: cut samples have no answer with it either.
    """
    if not trial.sizes:
        return trial
    try:
        answer(trial.cut(trial.samples))
        return trial
    except ServiceError as error:
        failure = error
    lengths = tuple(
        spec.name
        for spec in trial.inputs
        if spec.shape[:1] == (BATCH,) and all(size == 1 for size in spec.shape[1:]) and "INT" in spec.datatype
    )
    lowered = dataclasses.replace(trial, lengths=lengths)
    try:
        answer(lowered.cut(trial.samples))
    except ServiceError:
        raise BadArtifact(
            f"The model cannot answer the example inputs cut to {_listed(trial.shorter)}: {failure.message}",
            remedy="Name only dimensions that vary, and write `forward` for any size of them.",
        ) from failure
    return lowered


def eight_samples(samples: Arrays) -> Arrays:
    """The first eight samples, or fewer repeated in turn.

    Raises:
        BadArtifact: there is one sample, which could not show an effect of its neighbours; or inputs differ in their
            number of samples.
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
    """Contiguous copies, since engines read them in place."""
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
    """The inputs with their padding values, where padding changes no answer; and the proof.

    Args:
        who: name of the model, for the proof.
        answer: the model before the export.
        trial: samples to ask.
        outputs: its outputs.
        given: the user's padding values by input; None: 0 for every input that shares a dimension with a mask.
        limit: largest allowed relative error.

    Raises:
        BadArtifact: padding with the user's values changes the answers.
    """
    if given is None:
        masked = {dim for spec in trial.inputs if spec.name in _MASKS for dim in spec.shape if isinstance(dim, str)}
        masked.discard(BATCH)
        proposal: dict[str, float] = {
            spec.name: 0 for spec in trial.inputs if masked & set(spec.shape) and spec.datatype != "BYTES"
        }
    else:
        proposal = dict(given)
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
