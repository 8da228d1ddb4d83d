"""`stoker image`: a job with all that it needs, as an image for Podman, Docker and Kubernetes."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.text import Text

from stoker import api
from stoker.cli.terminal import (
    AsJson,
    JobFile,
    Settings,
    column_table,
    load_job,
    output,
    print_document,
    print_table,
    teller,
)
from stoker.records import to_json
from stoker.units import format_bytes

if TYPE_CHECKING:
    from stoker.launching.images.oci_image import ImageRecord


def image(
    job_file: JobFile,
    out: Annotated[Path, typer.Option("-o", "--out", metavar="FILE", help="The archive.")] = Path("image.tar"),
    settings: Settings = None,
    base: Annotated[
        Path | None, typer.Option("--base", metavar="IMAGE", help="An OCI archive or layout with Python to build upon.")
    ] = None,
    include: Annotated[
        list[Path] | None, typer.Option("--include", metavar="PATH", help="A further file or folder of the job.")
    ] = None,
    packages: Annotated[
        list[str] | None, typer.Option("--with", metavar="PACKAGE", help="A further installed package.")
    ] = None,
    name: Annotated[str, typer.Option("--name", metavar="NAME", help="The image's name; default: the job's.")] = "",
    as_json: AsJson = False,
) -> None:
    """Write an OCI image of a job: Python, packages, Stoker and code, without a daemon and without secrets."""
    with output(for_json=as_json):
        _, entry = load_job(job_file, settings)
        options = api.ImageOptions(base=base, include=tuple(include or ()), packages=tuple(packages or ()), name=name)
        made = api.build_image(job_file, entry, out, options, tell=teller(quiet=as_json))
    if as_json:
        print_document(to_json(made))
    else:
        render_image(made, Console())


def render_image(made: ImageRecord, console: Console) -> None:
    """Print the layers of an image, its name and digest, and how to run it."""
    table = column_table("layer", ">size", "digest", folds={"layer"})
    for layer in made.layers:
        table.add_row(Text(layer.what), format_bytes(layer.num_bytes), Text(layer.digest[:19], "dim"))
    print_table(table, console)
    lines = [f"\n{made.path}: {made.reference}, {format_bytes(made.num_bytes)}", made.digest]
    lines += [f"note: {note}" for note in made.notes]
    archive = shlex.quote(str(made.path))
    lines += [
        f"podman load -i {archive} && mkdir -p runs && podman run --rm -v ./runs:/runs {made.reference}",
        f"skopeo copy oci-archive:{archive} docker://REGISTRY/NAME    # for Kubernetes",
    ]
    for line in lines:
        console.print(Text(line), soft_wrap=True)
