"""`stoker export`: what the exported model takes and gives, what was checked, and its files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from stoker import api
from stoker.cli.terminal import AsJson, column_table, output, print_document, waiting
from stoker.errors import BadArtifact
from stoker.records import Manifest, Proof, TensorSpec, to_json
from stoker.records.codec import JSON
from stoker.units import format_bytes

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from stoker.artifacts import Artifact


def export(
    what: Annotated[
        str, typer.Argument(metavar="RUN|FILE", help="A run's directory, its name, `latest`; or a file model.onnx.")
    ],
    out: Annotated[
        Path, typer.Option("--out", "-o", metavar="DIR", help="The model's directory, such as models/digits.")
    ],
    inputs: Annotated[
        Path | None,
        typer.Option(
            "--inputs", metavar="FILE", help="Example inputs of an ONNX file, .npz (default: drawn at random)."
        ),
    ] = None,
    dynamic: Annotated[
        list[str] | None,
        typer.Option("--dynamic", metavar="INPUT.DIM=NAME", help="A dimension that may vary: input_ids.1=tokens"),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Export a trained model, or take over an ONNX file: graph, weights, golden answers, and proof that they agree."""
    examples, varying = read_inputs(inputs), read_dynamic(dynamic)
    with output(for_json=as_json), waiting("exporting, and checking every engine", quiet=as_json):
        artifact = api.export(what, out, inputs=examples, about=api.About(dynamic=varying))
    if as_json:
        print_document(export_document(artifact))
    else:
        render_export(artifact, Console())


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
    files = _table("file", "size", "SHA-256")
    for file in manifest.files:
        files.add_row(file.name, format_bytes(file.num_bytes), Text(f"{file.sha256[:12]}…", style="dim"))
    for table in (_signature(manifest), _proofs(manifest.proofs), files):
        console.print()
        console.print(table)
    console.print()
    metrics = " · ".join(f"{name} {value:.4g}" for name, value in manifest.metrics.items())
    allowed = f"{manifest.tolerance.absolute:.1e} + {manifest.tolerance.relative:.1e} of their size"
    lines = (
        "* as a share of the output's largest value",
        metrics,
        f"answers may differ by {allowed}; proved on {manifest.proved_on}",
    )
    console.print(Text("\n".join(filter(None, lines)), style="dim"), soft_wrap=True)
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
    dynamic: dict[str, dict[int, str]] = {}
    for option in options or ():
        place, _, name = option.partition("=")
        tensor, _, dim = place.rpartition(".")
        if not (name and tensor and dim.isascii() and dim.isdigit()):
            raise BadArtifact(f"--dynamic {option}: wanted INPUT.DIM=NAME, such as input_ids.1=tokens")
        dynamic.setdefault(tensor, {})[int(dim)] = name
    return dynamic


def read_inputs(path: Path | None) -> dict[str, NDArray[Any]] | None:
    """Example inputs from an .npz file; None where there is none.

    Raises:
        BadArtifact: it is no such file, or holds objects.
    """
    if path is None:
        return None
    try:
        return api.npz_arrays(path)
    except ValueError as error:
        remedy = "Write it with np.savez('inputs.npz', NAME=array, …), arrays of numbers."
        raise BadArtifact(f"--inputs {path} {error}", remedy=remedy) from error


def _signature(manifest: Manifest) -> Table:
    table = _table("", "tensor", "type", "shape")
    for what, specs in (("takes", manifest.inputs), ("gives", manifest.outputs)):
        for at, spec in enumerate(specs):
            table.add_row(Text(what if at == 0 else "", style="bold"), spec.name, spec.datatype, _shape(manifest, spec))
    return table


def _shape(manifest: Manifest, spec: TensorSpec) -> Text:
    dims = ", ".join(map(str, spec.shape))
    classes = manifest.labels.get(spec.name, ())
    notes = [
        *([f"padded with {spec.pad:g}"] if spec.pad is not None else []),
        *([f"{', '.join(classes[:3])}{', …' * (len(classes) > 3)}"] if classes else []),
    ]
    return Text.assemble(f"[{dims}]", (f"  {'; '.join(notes)}" * bool(notes), "dim"))


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


def _table(*titles: str) -> Table:
    return column_table(*titles, folds=titles)
