"""Commands that serve, and that ask how much a service holds."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from stoker.cli.options import AsJson, Debug
from stoker.cli.terminal import print_document, printable, reported
from stoker.records import to_json


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
    with reported(debug=debug):
        from stoker import flow
        from stoker.cli.services import announce, changes_told, door

        with changes_told():
            flow.serve(
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
        from stoker import flow

        done = flow.rollback(model, to=to, newest=newest)
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
        from stoker.cli.loadtests import LoadOptions, bench

        options = LoadOptions(
            models=models, slo=slo, url=url, model=model, rate=rate, callers=callers, seconds=seconds, inputs=inputs,
            rows=rows, sizes=tuple(sizes or ()), connections=connections, is_constant=constant,
            headers=tuple(headers or ()), writes=not dry_run,
        )  # fmt: skip
        found = bench(options, None if as_json else Console())
        if as_json:
            print_document(to_json(found))
