"""Loads a version from disk: files verified, engines loaded, golden answers compared. Blocks: run it on a thread."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from stoker import artifacts, engines
from stoker.artifacts import Arrays, Artifact, Golden, excess
from stoker.artifacts.golden import num_rows
from stoker.engines import Engine
from stoker.errors import BadArtifact
from stoker.records import Manifest, ServiceSettings
from stoker.serving.repository.model_settings import sized
from stoker.units import format_bytes


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """A version that passed its checks: its engines, one for each instance, and the loading time [s].

    `settings` have both instances and threads.
    """

    artifact: Artifact
    golden: Golden
    settings: ServiceSettings
    engines: tuple[Engine, ...]
    load_s: float


CHECKING_SHARE = 1 / 4
"""Share of the memory that inputs and outputs of the largest batch may take in the check of a version."""


def load_version(path: Path, settings: ServiceSettings, *, cores: int, memory_bytes: int = 0) -> Loaded:
    """Read a version, compare every file with its digest, load its engines, and compare each with the golden answers.

    With `memory_bytes` of the machine, a version whose largest batch takes too much of them is refused.

    Raises:
        BadArtifact: it is damaged, its engine cannot load it here, or its answers differ from those stored.
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
    """Refuse a batch that fills the memory: checking it would end the server with all models."""
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
    """Run the golden rows, the first row alone, and rows repeated up to `most_rows`; compare every output.

    A model without a batch is run once. Blocks; run it on a thread. It also warms the engine up.

    Raises:
        BadArtifact: an output exceeds the manifest's tolerance; with its difference.
        ServiceError: the engine could not answer.
    """
    cases = [(golden.inputs, golden.outputs)]
    if manifest.is_batched:
        available = num_rows(golden.inputs)
        cases += golden.in_batches(sorted({1, most_rows} - {available}))
    for inputs, expected in cases:
        outputs = engine.run(inputs)
        for name in expected:
            _compare(outputs, expected[name], name, manifest)


def _compare(outputs: Arrays, expected: NDArray[Any], name: str, manifest: Manifest) -> None:
    """Raise unless the output `name` is as expected, within the tolerance."""
    beyond, tolerance = excess(outputs, {name: expected}, manifest.tolerance), manifest.tolerance
    if beyond <= 1:
        return
    shape = list(expected.shape)
    if math.isinf(beyond):
        got = f"{outputs[name].dtype} {list(outputs[name].shape)}" if name in outputs else "nothing"
        how = f"is {got} where {expected.dtype} {shape} was stored, or has other texts, NaN or infinities"
    else:
        allowed = f"{tolerance.absolute:.3g} + {tolerance.relative:.3g} × the value"
        how = f"{shape} is off by {beyond:.3g} times what the manifest allows ({allowed})"
    raise BadArtifact(
        f"{manifest.name}: output {name!r} is not the golden answer: it {how}",
        remedy="The graph, or the engine's version or precision, is another than at export: export it again here.",
    )
