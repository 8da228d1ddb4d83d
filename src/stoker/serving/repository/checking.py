"""Whether an engine gives the answers that were stored with the model; what it is asked warms it up as well."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from stoker.artifacts import Arrays, Golden, excess
from stoker.artifacts.variations import num_rows, rows
from stoker.engines import Engine
from stoker.errors import BadArtifact
from stoker.records import Manifest


def check_answers(engine: Engine, manifest: Manifest, golden: Golden, *, most_rows: int) -> None:
    """Ask for the golden rows as they are, the first alone, and repeated up to `most_rows`; compare every answer.

    Models that are not batched are asked once. Blocks; run it on a thread.

    Raises:
        BadArtifact: an answer is not within the manifest's tolerance; it is said by how much.
        ServiceError: the engine could not answer at all.
    """
    for inputs, wanted in _questions(manifest, golden, most_rows):
        found = engine.run(inputs)
        for name in wanted:
            _compare(found, {name: wanted[name]}, name, manifest)


def _questions(manifest: Manifest, golden: Golden, most_rows: int) -> Iterator[tuple[Arrays, Arrays]]:
    """Inputs to ask, with the answers wanted: the golden rows, one of them, and as many as a batch may have."""
    yield golden.inputs, golden.outputs
    if not manifest.is_batched:
        return
    there = num_rows(golden.inputs)
    for wanted in sorted({1, most_rows} - {there}):
        order = (np.arange(wanted) % there).tolist()
        yield rows(golden.inputs, order), rows(golden.outputs, order)


def _compare(found: Arrays, wanted: Arrays, name: str, manifest: Manifest) -> None:
    """Raise unless the output `name` is the one wanted, as far as the tolerance goes."""
    beyond, tolerance = excess(found, wanted, manifest.tolerance), manifest.tolerance
    if beyond <= 1:
        return
    shape = list(wanted[name].shape)
    if math.isinf(beyond):
        got = f"{found[name].dtype} {list(found[name].shape)}" if name in found else "nothing"
        how = f"is {got} where {wanted[name].dtype} {shape} was stored, or has other texts, NaN or infinities"
    else:
        allowed = f"{tolerance.absolute:.3g} + {tolerance.relative:.3g} × the value"
        how = f"{shape} is off by {beyond:.3g} times what the manifest allows ({allowed})"
    raise BadArtifact(
        f"{manifest.name}: output {name!r} is not the golden answer: it {how}",
        remedy="The graph, or the engine's version or precision, is another than at export: export it again here.",
    )
