"""An exported model in the terminal: what it takes and gives, what was checked, and the files it consists of."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from rich.text import Text

from stoker.artifacts import Artifact
from stoker.errors import BadArtifact
from stoker.records import Manifest, Proof, TensorSpec, to_json
from stoker.records.codec import JSON
from stoker.units import format_bytes


def render_export(artifact: Artifact, console: Console) -> None:
    """Print an artifact."""
    manifest = artifact.manifest
    console.print(
        Text.assemble(
            (f"{manifest.name} ", "bold"),
            f"version {artifact.version}: {manifest.engine}, {manifest.precision}, ",
            format_bytes(artifact.num_bytes),
        )
    )
    for table in (_signature(manifest), _proofs(manifest.proofs), _files(manifest)):
        console.print()
        console.print(table)
    console.print()
    console.print(_standing(manifest), soft_wrap=True)
    for note in manifest.notes:
        console.print(Text.assemble(("note: ", "bold"), note), soft_wrap=True)
    console.print(Text.assemble(("written: ", "bold"), str(artifact.path)), soft_wrap=True)


def export_document(artifact: Artifact) -> dict[str, JSON]:
    """The artifact for `--json`."""
    return {
        "path": str(artifact.path),
        "version": artifact.version,
        "digest": artifact.digest,
        "manifest": to_json(artifact.manifest),
    }


def read_dynamic(options: Sequence[str] | None) -> dict[str, dict[int, str]]:
    """What `--dynamic INPUT.DIM=NAME` says.

    >>> read_dynamic(["input_ids.1=tokens"])
    {'input_ids': {1: 'tokens'}}

    Raises:
        BadArtifact: an option is of another form.
    """
    found: dict[str, dict[int, str]] = {}
    for option in options or ():
        place, _, name = option.partition("=")
        tensor, _, dim = place.rpartition(".")
        if not (name and tensor and dim.isascii() and dim.isdigit()):
            raise BadArtifact(f"--dynamic {option}: wanted INPUT.DIM=NAME, such as input_ids.1=tokens")
        found.setdefault(tensor, {})[int(dim)] = name
    return found


def read_inputs(path: Path | None) -> dict[str, NDArray[Any]] | None:
    """Example inputs from an .npz file; None where there is none.

    Raises:
        BadArtifact: it is no such file, or holds objects.
    """
    if path is None:
        return None
    try:
        with np.load(path, allow_pickle=False) as stored:
            return {name: stored[name] for name in stored.files}
    except (OSError, ValueError, TypeError, EOFError) as error:
        remedy = "Write it with np.savez('inputs.npz', NAME=array, …), arrays of numbers."
        raise BadArtifact(f"--inputs {path} cannot be read: {error}", remedy=remedy) from error


def _signature(manifest: Manifest) -> Table:
    table = _table("", "tensor", "type", "shape")
    for what, specs in (("takes", manifest.inputs), ("gives", manifest.outputs)):
        for at, spec in enumerate(specs):
            table.add_row(Text(what if at == 0 else "", style="bold"), spec.name, spec.datatype, _shape(manifest, spec))
    return table


def _shape(manifest: Manifest, spec: TensorSpec) -> Text:
    words = ", ".join(map(str, spec.shape))
    classes = manifest.labels.get(spec.name, ())
    notes = [
        *([f"padded with {spec.pad:g}"] if spec.pad is not None else []),
        *([f"{', '.join(classes[:3])}{', …' * (len(classes) > 3)}"] if classes else []),
    ]
    return Text.assemble(f"[{words}]", (f"  {'; '.join(notes)}" * bool(notes), "dim"))


def _proofs(proofs: Sequence[Proof]) -> Table:
    table = _table("checked", "largest difference*", "at most", "")
    for proof in proofs:
        holds = proof.error <= proof.limit
        table.add_row(
            proof.what,
            f"{proof.error:.1e}",
            f"{proof.limit:g}",
            Text("holds", style="green") if holds else Text("does not hold", style="red"),
        )
    return table


def _files(manifest: Manifest) -> Table:
    table = _table("file", "size", "SHA-256")
    for one in manifest.files:
        table.add_row(one.name, format_bytes(one.num_bytes), Text(f"{one.sha256[:12]}…", style="dim"))
    return table


def _standing(manifest: Manifest) -> Text:
    """What differences are shares of, what the model was worth when it was trained, when an answer is another one."""
    measured = " · ".join(f"{name} {value:.4g}" for name, value in manifest.metrics.items())
    allowed = f"{manifest.tolerance.absolute:.1e} + {manifest.tolerance.relative:.1e} of their size"
    lines = (
        "* as a share of the output's largest value",
        measured,
        f"answers may differ by {allowed}; proved on {manifest.proved_on}",
    )
    return Text("\n".join(filter(None, lines)), style="dim")


def _table(*titles: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for title in titles:
        table.add_column(title, overflow="fold")
    return table
