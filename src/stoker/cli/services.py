"""What `stoker serve` shows once it is up: doors, models, and a line to ask one of them with."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING
from urllib.parse import quote

from rich.console import Console
from rich.table import Table
from rich.text import Text

from stoker.cli.terminal import printable
from stoker.records import TensorSpec, to_json
from stoker.records.codec import JSON
from stoker.units import format_seconds

if TYPE_CHECKING:  # what they stand on is an extra, and looked for first
    from stoker.serving.observing.access_log import LineWriter
    from stoker.serving.options import ServedModel, Started

_MOST_SHOWN = 32
"""Numbers that an example line may have."""


def door(port: int) -> int | None:
    """A port as the server takes it: below 0, there is no such door."""
    return port if port >= 0 else None


@contextmanager
def changes_told() -> Iterator[None]:
    """Within the block, say on standard error what happens to models: a line when one is swapped, or fails.

    A thread writes the lines, so that nobody has to read them for the server to go on.
    """
    from stoker.serving.observing.access_log import LineWriter

    writer = LineWriter(None)
    handler = _Lines(writer)
    handler.setFormatter(logging.Formatter("%(asctime)s  %(message)s"))
    log, before = logging.getLogger("stoker.serving"), logging.getLogger("stoker.serving").level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(before)
        writer.close()


class _Lines(logging.Handler):
    """Hands formatted lines to a writer; names in them come from disks and clients."""

    def __init__(self, writer: LineWriter) -> None:
        super().__init__()
        self._writer = writer

    def emit(self, record: logging.LogRecord) -> None:
        """Queue a record's line, or several of a traceback."""
        self._writer.put("".join(f"{printable(line)}\n" for line in self.format(record).splitlines()))


def announce(started: Started, *, as_json: bool) -> None:
    """Tell that the server is up, at once, also where standard output is a file or a pipe."""
    if as_json:
        print(json.dumps(to_json(started), indent=2, ensure_ascii=False), flush=True)
    else:
        render_service(started, Console())


def render_service(started: Started, console: Console) -> None:
    """Print where the server listens, what it serves and how, and what it does not and why."""
    doors = (("http", started.http), ("grpc", started.grpc), ("admin", started.admin), ("admin", started.admin_grpc))
    for what, address in doors:
        if address is not None:
            console.print(Text.assemble((f"{what:<6}", "bold"), (address, "cyan"), _remark(what, started)))
    console.print()
    console.print(_models(started.models))
    for name, reasons in started.problems.items():
        for reason in reasons:
            told = Text.assemble(("✗ ", "bold red"), (printable(name), "bold"), f"  {printable(reason)}")
            console.print(told, soft_wrap=True)
    console.print()
    if started.models and started.http is not None:
        console.print(Text(printable(example(started.models[0], started)), "dim"), soft_wrap=True)


def example(model: ServedModel, started: Started) -> str:
    """A command that asks a model; where its inputs are too many to write, one that asks what it takes."""
    key = " -H 'Authorization: Bearer KEY'" if started.has_keys else ""
    secure = " -k" if started.has_tls else ""
    url = f"{started.http}/v2/models/{quote(model.name, safe='')}"
    tensors = [_zeros(spec) for spec in model.inputs]
    if any(tensor is None for tensor in tensors):
        return f"curl{secure}{key} {url}"
    return f"curl{secure}{key} {url}/infer -d '{json.dumps({'inputs': tensors}, separators=(',', ':'))}'"


def _zeros(spec: TensorSpec) -> JSON | None:
    """An input of zeros for one sample; None where that is long, or JSON does not carry its type."""
    shape = [size if isinstance(size, int) else 1 for size in spec.shape]
    if math.prod(shape) > _MOST_SHOWN or spec.datatype in {"FP16", "BF16"}:
        return None
    value = {"BYTES": "", "BOOL": False}.get(spec.datatype, 0)
    return {"name": spec.name, "shape": shape, "datatype": spec.datatype, "data": [value] * math.prod(shape)}


def _remark(what: str, started: Started) -> Text:
    """What to know of a door."""
    if what == "admin":
        return Text("  metrics at /metrics; load, unload, index", "dim")
    words = [word for word, holds in (("TLS", started.has_tls), ("API keys", started.has_keys)) if holds]
    return Text(f"  {', '.join(words)}" if words else "", "dim")


def _models(models: tuple[ServedModel, ...]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for title in ("model", "version", "engine", "precision", "instances × threads", "most rows", "loaded in"):
        table.add_column(title, no_wrap=title == "model")
    for one in models:
        settings = one.settings
        table.add_row(
            Text(printable(one.name), "bold"), one.version, one.engine, one.precision,
            f"{settings.instances} × {settings.threads}", str(settings.max_batch_rows), format_seconds(one.load_s),
        )  # fmt: skip
    return table
