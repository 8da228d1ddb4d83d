"""`stoker predict`: offline batches, shown as a bar in a terminal, plain lines elsewhere, or one JSON object a line."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer
from rich.console import Console

from stoker import api
from stoker.cli.terminal import AsJson
from stoker.errors import BadJob

if TYPE_CHECKING:
    from stoker.predicting.prediction_request import PredictOptions, Resize


def predict(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="An exported model.", show_default=False)],
    inputs: Annotated[
        list[str], typer.Argument(metavar="INPUT…", help="Files, folders and patterns with rows.", show_default=False)
    ],
    out: Annotated[Path, typer.Option("--out", "-o", metavar="DIR", help="Where the answers go.", show_default=False)],
    columns: Annotated[
        list[str] | None, typer.Option("--map", metavar="INPUT=COLUMN", help="The column, or the columns a,b,…, of it.")
    ] = None,
    keep: Annotated[str, typer.Option("--keep", metavar="COLUMNS", help="Columns to copy, with commas between.")] = "",
    pixels: Annotated[
        str, typer.Option("--pixels", metavar="VALUES", help="Of images: 0..255, 0..1, or MEAN/STD of 0 to 1.")
    ] = "",
    resize: Annotated[str, typer.Option("--resize", help="Images of another size: stretch, crop or pad.")] = "",
    allow_nan: Annotated[bool, typer.Option("--allow-nan", help="Give NaN and infinities to the model.")] = False,
    max_bad: Annotated[str, typer.Option("--max-bad", metavar="N", help="The most bad rows: 1%, or 100.")] = "1%",
    batch: Annotated[
        int | None, typer.Option("--batch", metavar="ROWS", min=1, help="Rows of a batch (default: measured).")
    ] = None,
    part_rows: Annotated[
        int | None, typer.Option("--part-rows", metavar="ROWS", min=1, help="Rows of a part (default: about 5 s).")
    ] = None,
    threads: Annotated[
        int | None, typer.Option("--threads", metavar="N", min=1, help="Threads of each instance (default: 1).")
    ] = None,
    new: Annotated[bool, typer.Option("--new", help="Start over, in the next free directory.")] = False,
    as_json: AsJson = False,
) -> None:
    """Answer all rows of files with an exported model, into Parquet. The same command again continues."""
    options = prediction_options(
        columns=columns,
        keep=keep,
        pixels=pixels,
        resize=resize,
        allow_nan=allow_nan,
        max_bad=max_bad,
        batch=batch,
        part_rows=part_rows,
        threads=threads,
    )
    with api.choose_display(
        subject="prediction", as_json=as_json, stdout=sys.stdout, console=Console(stderr=True)
    ) as display:
        api.predict(model, inputs, out, options, new=new, sink=display)


def prediction_options(
    *, columns: list[str] | None, keep: str, resize: str, batch: int | None, **others: Any
) -> PredictOptions:
    """What the command line's options mean.

    Raises:
        BadJob: one of them has a value that it does not take.
    """
    if resize not in {"", "stretch", "crop", "pad"}:
        raise BadJob(f"--resize {resize}: wanted stretch, crop or pad")
    kept = tuple(name.strip() for name in keep.split(",") if name.strip())
    return api.PredictOptions(
        columns=tuple(columns or ()), keep=kept, resize=cast("Resize", resize), batch_rows=batch, **others
    )
