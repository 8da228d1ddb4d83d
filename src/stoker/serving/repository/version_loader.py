"""From a version on disk to engines that have given the stored answers. Everything here blocks: run it on a thread.

Whether an engine gives the answers that were stored with the model; what it is asked warms it up as well.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from stoker import artifacts, engines
from stoker.artifacts import Arrays, Artifact, Golden, excess
from stoker.artifacts.golden import num_rows, rows
from stoker.engines import Engine
from stoker.errors import BadArtifact
from stoker.records import Manifest, ServiceSettings
from stoker.serving.repository.model_settings import sized
from stoker.units import format_bytes


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """A version that passed its checks: its engines, one for each instance, and how long that took [s].

    `settings` have both instances and threads.
    """

    artifact: Artifact
    golden: Golden
    settings: ServiceSettings
    engines: tuple[Engine, ...]
    load_s: float


CHECKING_SHARE = 1 / 4
"""Share of the memory that the inputs and answers of the largest batch may take when a version is checked."""


def load_version(path: Path, settings: ServiceSettings, *, cores: int, memory_bytes: int = 0) -> Loaded:
    """Read a version, compare every file with its digest, load its engines, and hold each to the golden answers.

    With `memory_bytes`, those of the machine, a largest batch that would take too much of them is refused.

    Raises:
        BadArtifact: it is damaged, no engine here can load it, or its answers are not those stored.
        ServiceError: an engine could not answer.
    """
    started = time.monotonic()
    artifact = artifacts.read(path)
    verified = artifact.verify()
    golden = artifact.golden()
    chosen = sized(settings, cores)
    _require_room(artifact, golden, chosen.max_batch_rows, memory_bytes)
    loaded = engines.load(artifact, instances=chosen.instances or 1, threads=chosen.threads)
    try:
        artifact.require_unchanged(verified)
        for engine in loaded:
            check_answers(engine, artifact.manifest, golden, most_rows=chosen.max_batch_rows)
    except BaseException:
        for engine in loaded:
            engine.close()
        raise
    return Loaded(artifact=artifact, golden=golden, settings=chosen, engines=loaded, load_s=time.monotonic() - started)


def _require_room(artifact: Artifact, golden: Golden, most_rows: int, memory_bytes: int) -> None:
    """Refuse a batch that fills the memory: checking it would end the server, and the models beside it."""
    if not artifact.manifest.is_batched or not memory_bytes:
        return
    arrays = (*golden.inputs.values(), *golden.outputs.values())
    num_bytes = most_rows * sum(array.nbytes // max(1, len(array)) for array in arrays)
    if num_bytes > CHECKING_SHARE * memory_bytes:
        raise BadArtifact(
            f"a batch of max_batch_rows={most_rows:,} takes {format_bytes(num_bytes)} for inputs and outputs; this "
            f"machine has {format_bytes(memory_bytes)}",
            remedy="Set a smaller max_batch_rows in service.json.",
        )


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
