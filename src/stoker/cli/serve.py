"""`stoker serve` and `stoker rollback`; once a server is up: its addresses, its models, and an example request."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import quote

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from stoker import api
from stoker.cli.terminal import AsJson, column_table, print_document, printable, say, setting_pairs
from stoker.errors import BadJob
from stoker.launching import parse_target
from stoker.records import TensorSpec, to_json
from stoker.records.codec import JSON
from stoker.units import format_seconds

if TYPE_CHECKING:
    from stoker.serving.access_log import LineWriter
    from stoker.serving.server import ServedModel, ServerStarted


_CLUSTER = "On a cluster"


def serve(
    context: typer.Context,
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
    on: Annotated[
        str,
        typer.Option(
            "--on", metavar="PLACE", help="here; k8s:NAMESPACE: a Deployment there.", rich_help_panel=_CLUSTER
        ),
    ] = "here",
    scale: Annotated[
        str, typer.Option("--scale", metavar="REPLICAS", help="3; 1..8: by load; 0..4.", rich_help_panel=_CLUSTER)
    ] = "1",
    image: Annotated[
        str, typer.Option("--image", metavar="IMAGE", help="With Stoker's extra `serve`.", rich_help_panel=_CLUSTER)
    ] = "",
    place_option: Annotated[
        list[str] | None,
        typer.Option("--place-option", metavar="NAME=VALUE", help="Such as claim=NAME.", rich_help_panel=_CLUSTER),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the manifests, and apply nothing.", rich_help_panel=_CLUSTER)
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Serve exported models over the Open Inference Protocol, HTTP and gRPC, until stopped."""
    if on != "here":
        _require_options_of_place(context, on)
        objects = api.deploy(
            [str(model) for model in models],
            on=on,
            image=image,
            scale=scale,
            overrides=tuple(settings or ()),
            options=setting_pairs(place_option, "--place-option"),
            dry_run=dry_run,
        )
        announce_deployment(objects, on=on, dry_run=dry_run, as_json=as_json)
        return
    with announce_changes():
        _require_options_of_place(context, on)
        api.serve(
            models,
            announce=lambda started: announce(started, as_json=as_json),
            host=host,
            http_port=door(http_port),
            grpc_port=door(grpc_port),
            admin_host=admin_host,
            admin_port=door(admin_port),
            admin_grpc_port=door(admin_grpc_port),
            overrides=tuple(settings or ()),
            api_keys=api_keys,
            admin_keys=admin_keys,
            tls_certificate=tls_cert,
            tls_key=tls_key,
            max_body_bytes=max_body * 2**20,
            max_bodies_bytes=max_bodies and max_bodies * 2**20,
            watch_s=watch or None,
            grace_s=grace,
            access_log=access_log,
            is_strict=strict,
        )


_OF_BOTH = ("models", "settings", "on", "as_json", "debug")


def _require_options_of_place(context: typer.Context, on: str) -> None:
    """Refuse options that would have no effect: those of a cluster here, and those of a server here on a cluster.

    Raises:
        BadJob: one is given.
    """
    is_here = on == "here"
    for parameter in context.command.params:
        name, is_of_cluster = parameter.name or "", getattr(parameter, "rich_help_panel", None) == _CLUSTER
        source = context.get_parameter_source(name)
        if name in _OF_BOTH or is_of_cluster is not is_here or source is None or source.name != "COMMANDLINE":
            continue
        option = parameter.opts[0]
        if is_here:
            raise BadJob(f"{option} is for a cluster", remedy="Add --on k8s:NAMESPACE, or leave it out.")
        raise BadJob(
            f"{option} is for a server on this machine, and has no effect on {on}",
            remedy="Leave it out; --place-option and --set are for services on a cluster.",
        )


def announce_deployment(objects: Sequence[dict[str, Any]], *, on: str, dry_run: bool, as_json: bool) -> None:
    """Print manifests that would be applied, or the objects that were and where the service is."""
    if as_json:
        print_document({"objects": list(objects), "applied": not dry_run})
    elif dry_run:
        from stoker.launching.kubernetes.cluster_api import as_yaml  # noqa: PLC0415 - --help loads no launcher

        print(as_yaml(objects), end="")
    else:
        name, (context, _, namespace) = objects[0]["metadata"]["name"], parse_target(on).address.rpartition("/")
        print("\n".join(f"{thing['kind']} {thing['metadata']['name']}" for thing in objects))
        print(f"http://{name}.{namespace}.svc:8000 in the cluster")
        where = f"--context {context} -n {namespace}" if context else f"-n {namespace}"
        print(f"it ends with: kubectl {where} delete deployment {name}")


def rollback(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="Its directory: models/digits.", show_default=False)],
    to: Annotated[
        int | None, typer.Option("--to", metavar="VERSION", min=1, help="Default: the one before that which serves.")
    ] = None,
    newest: Annotated[bool, typer.Option("--newest", help="Serve the newest again, and those to come.")] = False,
    as_json: AsJson = False,
) -> None:
    """Serve an older version of a model; a running server takes it up. Writes `versions` into service.json."""
    done = api.rollback(model, to=to, newest=newest)
    if as_json:
        print_document(to_json(done))
        return
    named = ("the newest version" if number is None else f"version {number}" for number in (done.before, done.now))
    before, now = named
    text = f"{done.model}: {now} serves from now on, instead of {before}"
    say(printable(text))


_MOST_SHOWN = 32
"""Numbers that an example line may have."""


def door(port: int) -> int | None:
    """A port as the server takes it [number]; None below 0: it does not listen there."""
    return port if port >= 0 else None


@contextmanager
def announce_changes() -> Iterator[None]:
    """Within the block, say on standard error what happens to models: a line when one is swapped, or fails.

    A thread writes the lines: the server goes on even if the stream is never read.
    """
    writer = api.LineWriter(None)
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
    """Print at once that the server is up, also where standard output is a file or a pipe."""
    if as_json:
        print(json.dumps(to_json(started), indent=2, ensure_ascii=False), flush=True)
    else:
        render_service(started, Console())


def render_service(started: ServerStarted, console: Console) -> None:
    """Print where the server listens, what it serves and how, and what it does not and why."""
    listeners = (
        ("http", started.http),
        ("grpc", started.grpc),
        ("admin", started.admin),
        ("admin", started.admin_grpc),
    )
    protection = [name for name, holds in (("TLS", started.has_tls), ("API keys", started.has_keys)) if holds]
    for what, address in listeners:
        if address is not None:
            remark = "metrics at /metrics; load, unload, index" if what == "admin" else ", ".join(protection)
            remark = f"  {remark}" if remark else ""
            console.print(Text.assemble((f"{what:<6}", "bold"), (address, "cyan"), (remark, "dim")))
    console.print()
    console.print(_models(started.models))
    for name, reasons in started.problems.items():
        for reason in reasons:
            text = Text.assemble(("✗ ", "bold red"), (printable(name), "bold"), f"  {printable(reason)}")
            console.print(text, soft_wrap=True)
    console.print()
    if started.models and started.http is not None:
        console.print(Text(printable(example(started.models[0], started)), "dim"), soft_wrap=True)


def example(model: ServedModel, started: ServerStarted) -> str:
    """A command that asks a model; where its inputs are too many to write, one that asks what it takes."""
    key = " -H 'Authorization: Bearer KEY'" if started.has_keys else ""
    secure = " -k" if started.has_tls else ""
    url = f"{started.http}/v2/models/{quote(model.name, safe='')}"
    tensors = [_plain_input(spec) for spec in model.inputs]
    if any(tensor is None for tensor in tensors):
        return f"curl{secure}{key} {url}"
    return f"curl{secure}{key} {url}/infer -d '{json.dumps({'inputs': tensors}, separators=(',', ':'))}'"


def _plain_input(spec: TensorSpec) -> JSON | None:
    """An input of zeros for one sample, of ones where zeros are padding, of which many models make NaN.

    None where that is long, or JSON does not carry its type.
    """
    shape = [size if isinstance(size, int) else 1 for size in spec.shape]
    if math.prod(shape) > _MOST_SHOWN or spec.datatype in {"FP16", "BF16"}:
        return None
    is_padding = spec.pad == 0
    value = {"BYTES": "", "BOOL": is_padding}.get(spec.datatype, int(is_padding))
    return {"name": spec.name, "shape": shape, "datatype": spec.datatype, "data": [value] * math.prod(shape)}


def _models(models: tuple[ServedModel, ...]) -> Table:
    titles = ("model", "version", "engine", "precision", "instances × threads", "most rows", "loaded in")
    table = column_table(*titles, folds=titles[1:])
    for model in models:
        settings = model.settings
        table.add_row(
            Text(printable(model.name), "bold"),
            model.version,
            model.engine,
            model.precision,
            f"{settings.instances} × {settings.threads}",
            str(settings.max_batch_rows),
            format_seconds(model.load_s),
        )
    return table
