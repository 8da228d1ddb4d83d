"""The command line: it starts flows and renders records; it decides nothing about training."""

from __future__ import annotations

import json
import math
import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TextIO

import typer
from rich.console import Console
from rich.text import Text

from stoker.errors import BadJob, RunFailed, StokerError
from stoker.records import to_json

if TYPE_CHECKING:
    from stoker.data.fashion import FashionMnist
    from stoker.jobs import Entry, Job

_INTERRUPTED = 130

app = typer.Typer(
    name="stoker",
    help="Work out what a training job needs, train it at the limit of the device, and prove that it learned the same.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
runs_app = typer.Typer(help="List runs, or compare two.", add_completion=False)
app.add_typer(runs_app, name="runs")

JobFile = Annotated[
    Path, typer.Argument(metavar="JOB", help="A Python file with a function `job`.", show_default=False)
]
Settings = Annotated[
    list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="Set a parameter of `job`; may be repeated.")
]
Place = Annotated[str, typer.Option("--on", metavar="PLACE", help="The device: here, cpu, cuda:0, …")]
Objective = Literal["time", "money", "energy"]
Places = Annotated[
    str, typer.Option("--on", metavar="PLACES", help="Devices to compare: here, or h100,l4,rtx4090, or all.")
]
Memory = Annotated[
    str | None, typer.Option("--memory", metavar="BYTES", help="The most of a device's memory to use, such as 6GB.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON on standard output and nothing else.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the whole traceback of an error.")]
DeviceWord = Annotated[
    str | None, typer.Argument(metavar="DEVICE", help="A name such as h100, rtx-4090.", show_default=False)
]
RunWord = Annotated[str, typer.Argument(metavar="RUN", help="A run's directory, its name, or `latest`.")]


@app.command()
def doctor(
    fresh: Annotated[bool, typer.Option("--fresh", help="Measure again, even where a result is cached.")] = False,
    on: Annotated[
        str | None, typer.Option("--on", metavar="PLACES", help="Measure links between processes as well: 2xhere, …")
    ] = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Tell what this machine is, and what it really reaches (about a minute the first time, then cached)."""
    with _reported(debug=debug):
        from stoker import data, flow
        from stoker.cli.doctor import doctor_document, look_around, render_doctor
        from stoker.flow.links import links_between

        with _waiting("measuring what the devices reach", quiet=as_json):
            found = flow.doctor(fresh=fresh)
            links = () if on is None else links_between(on, fresh=fresh)
        whereabouts = {"Fashion-MNIST": _whereabouts(data.fashion_mnist()[0])}
        around = look_around(data=whereabouts, load=found.load, problems=found.problems)
        if as_json:
            _print_document(doctor_document(found.devices, found.ceilings, around, found.operations, links))
        else:
            render_doctor(
                found.devices, found.ceilings, console=Console(), surroundings=around, operations=found.operations,
                links=links,
            )  # fmt: skip


@app.command()
def plan(
    job_file: JobFile,
    settings: Settings = None,
    on: Places = "here",
    max_cost: Annotated[
        str | None, typer.Option("--max-cost", metavar="USD", help="The most it may cost, such as 20usd.")
    ] = None,
    deadline: Annotated[
        str | None, typer.Option("--deadline", metavar="TIME", help="The longest it may take, such as 12h.")
    ] = None,
    objective: Annotated[
        Objective | None,
        typer.Option("--objective", help="What should be least (default: time; money where there is a deadline)."),
    ] = None,
    memory: Memory = None,
    explain: Annotated[
        bool, typer.Option("--explain", help="Show where bytes and time go, and what each rejected plan lost by.")
    ] = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Choose device and settings for a job, and forecast memory, time, energy and money before anything is spent."""
    with _reported(debug=debug):
        from stoker import flow
        from stoker.cli.plans import render_decision

        _warn_of_bad_rows()
        with _output(for_json=as_json), _waiting("working out what the job needs", quiet=as_json):
            job, entry = _load(job_file, settings)
            decision = flow.plan(
                job,
                on=on,
                max_cost=max_cost,
                deadline=deadline,
                entry=entry,
                objective=objective,
                memory=memory,
            )
        if as_json:
            _print_document(to_json(decision))
        else:
            render_decision(decision, Console(), explain=explain)


@app.command()
def train(
    job_file: JobFile,
    settings: Settings = None,
    on: Place = "here",
    run_dir: Annotated[Path | None, typer.Option("--run-dir", metavar="DIR", help="The run's directory.")] = None,
    plan_file: Annotated[Path | None, typer.Option("--plan", metavar="FILE", help="Use this plan.")] = None,
    new: Annotated[bool, typer.Option("--new", help="Start another run even if one could be continued.")] = False,
    resume: Annotated[str | None, typer.Option("--resume", metavar="RUN", help="Continue this run.")] = None,
    fork: Annotated[str | None, typer.Option("--fork", metavar="RUN", help="Start from this run's state.")] = None,
    checkpoint_every: Annotated[
        float | None, typer.Option("--checkpoint-every", metavar="SECONDS", min=0.001, help="Time between checkpoints.")
    ] = None,
    memory: Memory = None,
    profile: Annotated[
        bool, typer.Option("--profile", help="Run a few updates under PyTorch's profiler; see the report.")
    ] = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Plan a job, train it, report. The same command again continues what was cut off."""
    with _reported(debug=debug):
        if profile:  # read when torch is loaded: its profiler would write into the live display
            os.environ.setdefault("KINETO_LOG_LEVEL", "99")
            os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        if sum(bool(choice) for choice in (new, resume, fork)) > 1:
            raise BadJob("--new, --resume and --fork exclude each other", remedy="Give one of them, or none.")
        from stoker import flow, units
        from stoker.reporting.display import choose_display

        every = None if checkpoint_every is None else units.seconds(_finite(checkpoint_every))
        with _output(for_json=as_json) as stdout:
            job, entry = _load(job_file, settings)
            with choose_display(as_json=as_json, stdout=stdout, console=Console(stderr=True)) as display:
                run = flow.train(
                    job, on=on, run_dir=run_dir, plan=plan_file, new=new, resume=resume, fork=fork,
                    checkpoint_every=every, memory=memory, profile=profile, entry=entry, sink=display,
                )  # fmt: skip
        if run.status == "unfinished":
            raise typer.Exit(_INTERRUPTED)


@app.command("take-part", hidden=True)
def take_part(directory: Path, job_file: JobFile, settings: Settings = None, debug: Debug = False) -> None:
    """Train a run as one of the processes that `stoker train --on 2xhere` starts."""
    with _reported(debug=debug):
        from stoker import flow

        job, entry = _load(job_file, settings)
        raise typer.Exit(flow.take_part_in(directory, job, entry))


@app.command()
def verify(
    job_file: JobFile, settings: Settings = None, on: Place = "here", as_json: AsJson = False, debug: Debug = False
) -> None:
    """Examine the exactness contract for a job: separable? exact on resume? equal under its plan?"""
    with _reported(debug=debug):
        from stoker import flow
        from stoker.cli.verdicts import render_verdicts

        with _output(for_json=as_json), _waiting("examining the job", quiet=as_json):
            job, entry = _load(job_file, settings)
            verdicts = flow.verify(job, on=on, entry=entry)
        if as_json:
            _print_document({"verdicts": to_json(verdicts), "passed": all(v.passed for v in verdicts)})
        else:
            render_verdicts(job.name or job_file.stem, verdicts, console=Console())
        if not all(verdict.passed for verdict in verdicts):
            raise typer.Exit(RunFailed.exit_code)


@app.command("lr-range")
def lr_range(
    job_file: JobFile,
    settings: Settings = None,
    on: Place = "here",
    updates: Annotated[int, typer.Option("--updates", help="Updates of one sweep.")] = 100,
    seeds: Annotated[int, typer.Option("--seeds", help="Sweeps, each with a seed of its own.")] = 2,
    seconds: Annotated[float, typer.Option("--seconds", help="The longest all sweeps together may take.")] = 120.0,
    plan_file: Annotated[Path | None, typer.Option("--plan", metavar="FILE", help="Use this plan.")] = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Find the learning rates a job bears, in a few hundred updates that are thrown away; nothing is changed."""
    with _reported(debug=debug):
        from stoker import flow
        from stoker.cli.lr_range import render_lr_range

        with _output(for_json=as_json), _waiting("trying learning rates", quiet=as_json):
            job, entry = _load(job_file, settings)
            found = flow.lr_range(
                job, on=on, updates=updates, seeds=seeds, seconds=seconds, plan=plan_file, entry=entry
            )
        if as_json:
            _print_document(to_json(found))
        else:
            render_lr_range(job.name or job_file.stem, found, Console())


@app.command()
def report(run: RunWord = "latest", as_json: AsJson = False, debug: Debug = False) -> None:
    """Write a run's report anew, and show its summary."""
    with _reported(debug=debug):
        from stoker import flow
        from stoker.reporting import summary_lines

        path = flow.report(run)
        record = flow.load(run).directory.read_report()
        if as_json:
            _print_document({"report": str(path), "run": to_json(record.run)})
            return
        Console().print("\n".join(summary_lines(record)), highlight=False, markup=False)
        Console().print(f"report: {path}", highlight=False, markup=False, soft_wrap=True)


@app.command()
def devices(
    device: DeviceWord = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """List devices that can be planned for, or show what is known of one, with sources."""
    with _reported(debug=debug):
        from stoker.cli.devices import devices_document, render_device, render_devices
        from stoker.devices import attached_devices, catalogue, find_devices, price_list

        known, attached, prices = catalogue(), attached_devices(), price_list(date.today())  # noqa: DTZ011 - local day
        entries = known.entries if device is None else find_devices(device, known)
        if as_json:
            _print_document(devices_document(entries, known, prices, attached))
        elif device is None:
            render_devices(known, prices, attached, Console())
        else:
            for entry in entries:
                render_device(entry, prices, attached, Console())


@app.command()
def prices(
    device: DeviceWord = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """List what an hour of each device costs at least, or every offer for one."""
    with _reported(debug=debug):
        from stoker.cli.prices import prices_document, render_offers, render_prices
        from stoker.devices import catalogue, find_devices, price_list

        today = date.today()  # noqa: DTZ011 - the user's day
        offers = price_list(today)
        entries = catalogue().entries if device is None else find_devices(device)
        if as_json:
            _print_document(prices_document(entries, offers, today))
        elif device is None:
            render_prices(entries, offers, today, Console())
        else:
            for entry in entries:
                render_offers(entry, offers, today, Console())


@app.command()
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
        list[str] | None, typer.Option("--set", metavar="[MODEL.]NAME=VALUE", help="Outranks service.json.")
    ] = None,
    api_keys: Annotated[
        Path | None, typer.Option("--api-keys", metavar="FILE", help="Who may ask: a line NAME:KEY for each.")
    ] = None,
    admin_keys: Annotated[
        Path | None, typer.Option("--admin-keys", metavar="FILE", help="Who may use the admin port.")
    ] = None,
    tls_cert: Annotated[Path | None, typer.Option("--tls-cert", metavar="FILE", help="PEM, for all ports.")] = None,
    tls_key: Annotated[Path | None, typer.Option("--tls-key", metavar="FILE", help="PEM, unencrypted.")] = None,
    max_body: Annotated[int, typer.Option("--max-body", metavar="MIB", min=1, help="The largest request.")] = 64,
    watch: Annotated[
        float, typer.Option("--watch", metavar="SECONDS", min=0, help="Look for new versions so often; 0: never.")
    ] = 1.0,
    grace: Annotated[
        float, typer.Option("--grace", metavar="SECONDS", min=0, help="A shutdown waits so long for answers.")
    ] = 30.0,
    access_log: Annotated[
        str | None, typer.Option("--access-log", metavar="FILE", help="A line of JSON a request; -: standard error.")
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Do not start unless every model can be served.")] = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Serve exported models over the Open Inference Protocol, HTTP and gRPC, until stopped."""
    with _reported(debug=debug):
        from stoker import flow
        from stoker.cli.services import announce, changes_told, door

        with changes_told():
            flow.serve(
                models,
                announce=lambda started: announce(started, as_json=as_json),
                host=host, http_port=door(http_port), grpc_port=door(grpc_port), admin_host=admin_host,
                admin_port=door(admin_port), admin_grpc_port=door(admin_grpc_port), overrides=tuple(settings or ()),
                api_keys=api_keys, admin_keys=admin_keys, tls_certificate=tls_cert, tls_key=tls_key,
                max_body_bytes=max_body * 2**20, watch_s=watch or None, grace_s=grace, access_log=access_log,
                is_strict=strict,
            )  # fmt: skip


@app.command()
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
    resize: Annotated[str, typer.Option("--resize", help="Images of another size: stretch, or crop.")] = "",
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
    debug: Debug = False,
) -> None:
    """Answer all rows of files with an exported model, into Parquet. The same command again continues."""
    with _reported(debug=debug):
        from stoker import flow
        from stoker.cli.predictions import prediction_display, prediction_options

        options = prediction_options(
            columns=columns, keep=keep, pixels=pixels, resize=resize, allow_nan=allow_nan, max_bad=max_bad,
            batch=batch, part_rows=part_rows, threads=threads,
        )  # fmt: skip
        with prediction_display(as_json=as_json, stdout=sys.stdout, console=Console(stderr=True)) as display:
            flow.predict(model, inputs, out, options, new=new, sink=display)


@app.command("bench-serve")
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
    with _reported(debug=debug):
        from stoker.cli.loadtests import LoadOptions, bench

        options = LoadOptions(
            models=models, slo=slo, url=url, model=model, rate=rate, callers=callers, seconds=seconds, inputs=inputs,
            rows=rows, sizes=tuple(sizes or ()), connections=connections, is_constant=constant,
            headers=tuple(headers or ()), writes=not dry_run,
        )  # fmt: skip
        found = bench(options, None if as_json else Console())
        if as_json:
            _print_document(to_json(found))


@runs_app.callback(invoke_without_command=True)
def runs(context: typer.Context, as_json: AsJson = False, debug: Debug = False) -> None:
    """List the runs here, newest first."""
    if context.invoked_subcommand is not None:
        return
    with _reported(debug=debug):
        from stoker.cli.runs import render_runs, runs_document
        from stoker.store import list_runs, runs_root

        found = [(one.path, one.read_run(), one.read_spec()) for one in list_runs(runs_root())]
        if as_json:
            _print_document(runs_document(found))
        else:
            render_runs(found, Console())


@runs_app.command("diff")
def runs_diff(
    first: Annotated[str, typer.Argument(metavar="A")],
    second: Annotated[str, typer.Argument(metavar="B")],
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Compare two runs: what was asked, how it was executed, what came of it."""
    with _reported(debug=debug):
        from stoker.cli.runs import diff_document, render_diff
        from stoker.store import find_run, runs_root

        a, b = (find_run(runs_root(), word).read_report() for word in (first, second))
        if as_json:
            _print_document(diff_document(a, b))
        else:
            render_diff(a, b, Console())


@app.command()
def export(
    what: Annotated[
        str, typer.Argument(metavar="RUN|FILE", help="A run's directory, its name, `latest`; or a file model.onnx.")
    ],
    out: Annotated[
        Path, typer.Option("--out", "-o", metavar="DIR", help="The model's directory, such as models/digits.")
    ],
    inputs: Annotated[
        Path | None, typer.Option("--inputs", metavar="FILE", help="Example inputs for an ONNX file, as .npz.")
    ] = None,
    dynamic: Annotated[
        list[str] | None,
        typer.Option("--dynamic", metavar="INPUT.DIM=NAME", help="A dimension that may vary: input_ids.1=tokens"),
    ] = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Export a trained model, or take over an ONNX file: graph, weights, golden answers, and proof that they agree."""
    with _reported(debug=debug):
        from stoker.cli.exports import export_document, read_dynamic, read_inputs, render_export

        examples, varying = read_inputs(inputs), read_dynamic(dynamic)
        with _output(for_json=as_json), _waiting("exporting, and checking every engine", quiet=as_json):
            from stoker import flow
            from stoker.exporting import About

            artifact = flow.export(what, out, inputs=examples, about=About(dynamic=varying))
        if as_json:
            _print_document(export_document(artifact))
        else:
            render_export(artifact, Console())


@app.command()
def compress(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="An exported model's directory, such as models/digits.")],
    max_drop: Annotated[
        str, typer.Option("--max-drop", metavar="DROP", help="The most the metric may lose: 0.5%, or a number.")
    ] = "0.5%",
    metric: Annotated[
        str | None,
        typer.Option("--metric", metavar="NAME|FILE", help="A name, or a Python file with metric(outputs, targets)."),
    ] = None,
    job_file: Annotated[
        Path | None, typer.Option("--job", metavar="FILE", help="The job file whose data to use.")
    ] = None,
    data: Annotated[
        Path | None, typer.Option("--data", metavar="FILE", help="Rows instead, .npz or .parquet: inputs and target.")
    ] = None,
    batch: Annotated[
        list[int] | None, typer.Option("--batch", metavar="ROWS", help="A batch size that counts; may be repeated.")
    ] = None,
    threads: Annotated[int | None, typer.Option("--threads", min=1, help="Threads of an engine.")] = None,
    seconds: Annotated[float, typer.Option("--seconds", help="About how long the search may take.")] = 180.0,
    seed: Annotated[int, typer.Option("--seed", help="Deals out the rows.")] = 0,
    keep_all: Annotated[
        Path | None, typer.Option("--keep-all", metavar="DIR", help="Keep the graphs of all candidates.")
    ] = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Make an exported model smaller and faster, with proof that it keeps its metric and is faster here."""
    with _reported(debug=debug):
        from stoker import flow
        from stoker.cli.compressions import compression_document, render_compression, teller

        with _output(for_json=as_json):
            found = flow.compress(
                model, max_drop=max_drop, job=None if job_file is None else _load(job_file, None)[0], data=data,
                metric=metric, batch_sizes=tuple(sorted(set(batch or ()))), threads=threads, seconds=seconds, seed=seed,
                keep_all=keep_all, tell=teller(Console(stderr=True), quiet=as_json),
            )  # fmt: skip
        if as_json:
            _print_document(compression_document(found))
        else:
            render_compression(found, Console())


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    app(args=None if arguments is None else list(arguments))


def _finite(seconds: float) -> float:
    if not math.isfinite(seconds):
        raise BadJob(f"--checkpoint-every {seconds}: wanted a number of seconds, such as 3600")
    return seconds


def _whereabouts(source: FashionMnist) -> str:
    return "found" if source.is_here() else "not here: downloaded when asked for, else the digits in the package"


def _warn_of_bad_rows() -> None:
    """Name, on standard error, the rows of the user's catalogue and price files that cannot be used."""
    from stoker.devices import catalogue, price_list

    console = Console(stderr=True, highlight=False)
    today = date.today()  # noqa: DTZ011 - the user's day
    for problem in dict.fromkeys((*catalogue().problems, *price_list(today).problems)):
        console.print(Text.assemble(("warning: ", "bold yellow"), problem), soft_wrap=True)


def _load(path: Path, settings: list[str] | None) -> tuple[Job, Entry]:
    from stoker.jobs import load_job

    pairs = {}
    for setting in settings or ():
        name, equals, value = setting.partition("=")
        if not equals or not name:
            raise BadJob(f"--set {setting}: wanted NAME=VALUE")
        pairs[name.strip()] = value
    return load_job(path, pairs)


@contextmanager
def _reported(*, debug: bool) -> Iterator[None]:
    """Show an error that a user can mend in words, after its traceback if asked for, and exit with its code."""
    try:
        yield
    except StokerError as error:
        if debug:
            traceback.print_exception(error)
        console = Console(stderr=True, highlight=False)
        console.print(Text.assemble(("error: ", "bold red"), error.message), soft_wrap=True)
        if error.remedy:
            console.print(Text.assemble(("try:   ", "bold"), error.remedy), soft_wrap=True)
        raise typer.Exit(error.exit_code) from error
    except KeyboardInterrupt:
        Console(stderr=True).print("interrupted")
        raise typer.Exit(_INTERRUPTED) from None


@contextmanager
def _output(*, for_json: bool) -> Iterator[TextIO]:
    """Standard output; what the job prints within the block goes to standard error if it is `for_json`."""
    stdout = sys.stdout
    with redirect_stdout(sys.stderr if for_json else stdout):
        yield stdout


@contextmanager
def _waiting(what: str, *, quiet: bool) -> Iterator[None]:
    """A sign of life on standard error while something takes seconds."""
    console = Console(stderr=True)
    if quiet or not console.is_terminal:
        yield
        return
    with console.status(f"{what} …"):
        yield


def _print_document(document: Any) -> None:
    print(json.dumps(document, indent=2, ensure_ascii=False))
