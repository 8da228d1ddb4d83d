"""Commands that serve, and that ask how much a service holds.

What `stoker serve` shows once it is up: doors, models, and a line to ask one of them with.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated
from urllib.parse import quote

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from stoker import api
from stoker.cli.terminal import AsJson, Debug, print_document, printable, reported
from stoker.records import TensorSpec, to_json
from stoker.records.codec import JSON
from stoker.units import format_seconds

if TYPE_CHECKING:
    from stoker.serving.access_log import LineWriter
    from stoker.serving.server import ServedModel, ServerStarted


def serve(
    models: Annotated[
        list[Path], typer.Argument(metavar="MODELS…", help="Models, or directories of models.", show_default=False)
    ],
    host: Annotated[str, typer.Option("--host", help="Where to listen; 0.0.0.0: at every address.")] = "127.0.0.1",
    http_port: Annotated[int, typer.Option("--http-port", min=-1, help="0: a free one; -1: none.")] = 8000,
    grpc_port: Annotated[int, typer.Option("--grpc-port", min=-1, help="0: a free one; -1: none.")] = 8001,
    admin_host: Annotated[str, typer.Option("--admin-host", help="For metrics, and to load models.")] = "127.0.0.1",
    admin_port: Annotated[int, typer.Option("--admin-port", min=-1, help="0: a free one; -1: none.")] = 8002,
    admin_grpc_port: Annotated[
        int, typer.Option("--admin-grpc-port", min=-1, help="For gRPC clients that load models.")
    ] = -1,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="[MODEL.]NAME=VALUE", help="A setting, over what service.json says."),
    ] = None,
    api_keys: Annotated[
        Path | None, typer.Option("--api-keys", metavar="FILE", help="Who may ask: a line NAME:KEY for each.")
    ] = None,
    admin_keys: Annotated[
        Path | None, typer.Option("--admin-keys", metavar="FILE", help="Who may use the admin port.")
    ] = None,
    tls_cert: Annotated[Path | None, typer.Option("--tls-cert", metavar="FILE", help="PEM, for all ports.")] = None,
    tls_key: Annotated[Path | None, typer.Option("--tls-key", metavar="FILE", help="PEM, unencrypted.")] = None,
    max_body: Annotated[int, typer.Option("--max-body", metavar="MIB", min=1, help="The largest request body.")] = 64,
    max_bodies: Annotated[
        int | None,
        typer.Option("--max-bodies", metavar="MIB", min=1, help="All bodies at a time (default: 16 of these)."),
    ] = None,
    watch: Annotated[
        float, typer.Option("--watch", metavar="SECONDS", min=0, help="Look for new versions so often; 0: never.")
    ] = 1.0,
    grace: Annotated[
        float, typer.Option("--grace", metavar="SECONDS", min=0, help="A shutdown waits so long for answers.")
    ] = 25.0,
    access_log: Annotated[
        str | None, typer.Option("--access-log", metavar="FILE", help="A line of JSON a request; -: standard error.")
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Do not start unless every model can be served.")] = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Serve exported models over the Open Inference Protocol, HTTP and gRPC, until stopped."""
    with reported(debug=debug), announce_changes():
        api.serve(
                models,
                announce=lambda started: announce(started, as_json=as_json),
                host=host, http_port=door(http_port), grpc_port=door(grpc_port), admin_host=admin_host,
                admin_port=door(admin_port), admin_grpc_port=door(admin_grpc_port), overrides=tuple(settings or ()),
                api_keys=api_keys, admin_keys=admin_keys, tls_certificate=tls_cert, tls_key=tls_key,
                max_body_bytes=max_body * 2**20, max_bodies_bytes=max_bodies and max_bodies * 2**20,
                watch_s=watch or None, grace_s=grace, access_log=access_log, is_strict=strict,
            )  # fmt: skip


def rollback(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="Its directory: models/digits.", show_default=False)],
    to: Annotated[
        int | None, typer.Option("--to", metavar="VERSION", min=1, help="Default: the one before that which serves.")
    ] = None,
    newest: Annotated[bool, typer.Option("--newest", help="Serve the newest again, and those to come.")] = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Serve an older version of a model; a running server takes it up. Writes `versions` into service.json."""
    with reported(debug=debug):
        done = api.rollback(model, to=to, newest=newest)
        if as_json:
            print_document(to_json(done))
            return
        named = ("the newest version" if number is None else f"version {number}" for number in (done.before, done.now))
        before, now = named
        told = f"{done.model}: {now} serves from now on, before {before}"
        Console().print(printable(told), highlight=False, markup=False, soft_wrap=True)


def bench_serve(
    models: Annotated[
        Path | None, typer.Argument(metavar="[MODELS]", help="A model, or a directory of models.", show_default=False)
    ] = None,
    slo: Annotated[
        str | None, typer.Option("--slo", metavar="pQ=TIME", help="What to hold, such as p99=20ms: find the rate.")
    ] = None,
    url: Annotated[str | None, typer.Option("--url", help="A server that runs, instead of one started here.")] = None,
    model: Annotated[str, typer.Option("--model", metavar="NAME", help="Which of several.")] = "",
    rate: Annotated[float | None, typer.Option("--rate", metavar="PER_S", help="Measure this rate alone.")] = None,
    callers: Annotated[
        int | None, typer.Option("--callers", metavar="N", help="Measure so many who wait for their answers.")
    ] = None,
    seconds: Annotated[
        float | None, typer.Option("--seconds", min=0.1, help="The time for it (default: 180 for a search, else 10).")
    ] = None,
    inputs: Annotated[Path | None, typer.Option("--inputs", metavar="FILE", help="Rows to ask about, .npz.")] = None,
    rows: Annotated[int, typer.Option("--rows", min=1, help="Samples in each request.")] = 1,
    sizes: Annotated[
        list[str] | None, typer.Option("--sizes", metavar="DIM=LOW-HIGH", help="Sizes drawn, such as tokens=8-128.")
    ] = None,
    connections: Annotated[int, typer.Option("--connections", min=1, max=900, help="At most so many.")] = 128,
    constant: Annotated[bool, typer.Option("--constant", help="Requests at equal distances, not at random.")] = False,
    headers: Annotated[
        list[str] | None, typer.Option("--header", metavar="NAME: VALUE", help="Sent along, such as an API key.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Write no service.json.")] = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Find the rate a model's service holds within a latency, and the settings that hold it; or measure one rate."""
    with reported(debug=debug):
        from stoker.cli.bench_serve import LoadOptions, bench

        options = LoadOptions(
            models=models, slo=slo, url=url, model=model, rate=rate, callers=callers, seconds=seconds, inputs=inputs,
            rows=rows, sizes=tuple(sizes or ()), connections=connections, is_constant=constant,
            headers=tuple(headers or ()), writes=not dry_run,
        )  # fmt: skip
        found = bench(options, None if as_json else Console())
        if as_json:
            print_document(to_json(found))


_MOST_SHOWN = 32
"""Numbers that an example line may have."""


def door(port: int) -> int | None:
    """A port as the server takes it: below 0, there is no such door."""
    return port if port >= 0 else None


@contextmanager
def announce_changes() -> Iterator[None]:
    """Within the block, say on standard error what happens to models: a line when one is swapped, or fails.

    A thread writes the lines, so that nobody has to read them for the server to go on.
    """
    from stoker.serving.access_log import LineWriter

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


def announce(started: ServerStarted, *, as_json: bool) -> None:
    """Tell that the server is up, at once, also where standard output is a file or a pipe."""
    if as_json:
        print(json.dumps(to_json(started), indent=2, ensure_ascii=False), flush=True)
    else:
        render_service(started, Console())


def render_service(started: ServerStarted, console: Console) -> None:
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


def example(model: ServedModel, started: ServerStarted) -> str:
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


def _remark(what: str, started: ServerStarted) -> Text:
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
