"""The accepted candidate as the next version of its model."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path

from safetensors.numpy import save_file

from stoker.artifacts import Artifact, Golden, publish
from stoker.compressing.contender import Contender
from stoker.errors import BadArtifact
from stoker.records import ArtifactSource, FileDigest, Manifest, Proof, dumps
from stoker.records.compression import Compression
from stoker.store import write_atomic
from stoker.store.disk_errors import disk_errors

RECORD = "compression.json"
"""Every trial of the search, beside the graph that came of it."""

_GOLDEN = "golden.safetensors"


def publish_chosen(source: Artifact, chosen: Contender, record: Compression, model: Path) -> Artifact:
    """Write the chosen candidate as the next version of `model`, with its golden answers and the record of the search.

    Raises:
        BadArtifact: the disk is full, or cannot be written.
    """

    def write(directory: Path, digests: Callable[[], tuple[FileDigest, ...]]) -> Manifest:
        asked = source.golden().inputs
        with disk_errors(directory, "the compressed model", error=BadArtifact, option="-o DIR"):
            for path in (*chosen.made.files, *chosen.made.beside):
                shutil.copyfile(path, directory / path.name)
            save_file(Golden(asked, chosen.engine.run(asked)).as_tensors(), directory / _GOLDEN)
        write_atomic(directory / RECORD, dumps(record) + "\n", what=RECORD, error=BadArtifact)
        tolerance = chosen.trial.tolerance or source.manifest.tolerance
        return dataclasses.replace(
            chosen.manifest,
            graph=chosen.made.graph.name,
            golden=_GOLDEN,
            tolerance=tolerance,
            metrics=_metrics(record, chosen),
            proofs=_proofs(chosen),
            notes=record.notes,
            proved_on=record.proved_on,
            source=ArtifactSource(
                kind="artifact", name=f"{source.manifest.name}/{source.version}", digest=source.digest
            ),
            libraries=record.libraries,
            made_at=record.made_at,
            files=digests(),
        )

    return publish(model, write)


def _metrics(record: Compression, chosen: Contender) -> dict[str, float]:
    """The metric on the rows of acceptance; what was measured of the original does not hold any more."""
    drop = chosen.trial.drop.value if chosen.trial.drop is not None else 0.0
    return {record.metric: record.baseline + (drop if record.lower_is_better else -drop)}


def _proofs(chosen: Contender) -> tuple[Proof, ...]:
    return tuple(Proof(what=gate.what, error=gate.found, limit=gate.limit) for gate in chosen.trial.gates)
