"""From a version on disk to engines that have given the stored answers. Everything here blocks: run it on a thread."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from stoker import artifacts, engines
from stoker.artifacts import Artifact, Golden
from stoker.engines import Engine
from stoker.errors import BadArtifact
from stoker.records import ServiceSettings
from stoker.serving.repository.checking import check_answers
from stoker.serving.repository.sizing import sized
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
