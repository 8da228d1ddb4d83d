"""The command line: it starts flows and renders records; it decides nothing about training."""

from __future__ import annotations

import functools
import inspect
import io
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Annotated, Any

import typer

from stoker.cli import (
    bench_serve,
    compressions,
    data_check,
    elsewhere,
    exports,
    images,
    jobs,
    machines,
    pool,
    pool_agent,
    pool_contract,
    predictions,
    run_commands,
    serve,
    tune,
    ui,
)
from stoker.cli.terminal import UNREAD, Debug, is_unread, reported
from stoker.imports import import_name

BEFORE, TRAINING, ELSEWHERE, AFTER = "Before training", "Training", "Runs elsewhere", "After training"
"""What commands are for: the parts of `stoker --help`."""

app = typer.Typer(
    name="stoker", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich"
)


def _show_version(is_asked: bool) -> None:
    if is_asked:
        version = import_name("importlib.metadata", "version")  # which no other command needs
        typer.echo(f"stoker {version('stoker')}")
        raise typer.Exit


def _command(function: Callable[..., None]) -> Callable[..., None]:
    """`function` as a command with `--debug`, whose errors are shown as text and become exit codes.

    Of a group, `--debug` is for the command that follows: `stoker --debug train`, `stoker runs --debug diff`.
    """
    # What Typer reads a command's options from, evaluated once for all that it reads.
    stated = inspect.signature(function, eval_str=True)
    takes_context = "context" in stated.parameters

    @functools.wraps(function)
    def run(*, debug: bool, context: typer.Context, **arguments: Any) -> None:
        context.obj = debug or bool(context.obj)  # a context begins with what its parent holds
        with reported(debug=context.obj):
            function(**arguments, **({"context": context} if takes_context else {}))

    parameters = list(stated.parameters.values())
    if not takes_context:
        parameters.append(inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context))
    parameters.append(inspect.Parameter("debug", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=Debug))
    vars(run)["__signature__"] = stated.replace(parameters=parameters)
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def stoker(
    _version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and stop.")
    ] = False,
) -> None:
    """Work out what a training job needs, train it at the limit of the device, and prove that it learned the same."""


app.callback()(_command(stoker))
app.command(rich_help_panel=BEFORE)(jobs.plan)
app.command(rich_help_panel=BEFORE)(machines.doctor)
app.command(rich_help_panel=BEFORE)(machines.devices)
app.command(rich_help_panel=BEFORE)(machines.prices)
app.command("lr-range", rich_help_panel=BEFORE)(jobs.lr_range)
app.command(rich_help_panel=TRAINING)(jobs.train)
app.command("take-part", hidden=True)(jobs.take_part)
app.command(rich_help_panel=TRAINING)(jobs.verify)
app.command(rich_help_panel=TRAINING)(tune.tune)
app.command(rich_help_panel=TRAINING)(run_commands.report)
app.command(rich_help_panel=ELSEWHERE)(elsewhere.places)
app.command(rich_help_panel=ELSEWHERE)(elsewhere.logs)
app.command(rich_help_panel=ELSEWHERE)(elsewhere.attach)
app.command(rich_help_panel=ELSEWHERE)(elsewhere.stop)
app.command(rich_help_panel=ELSEWHERE)(elsewhere.fetch)
app.command(rich_help_panel=ELSEWHERE)(images.image)
app.command(rich_help_panel=TRAINING)(ui.ui)
app.command(rich_help_panel=AFTER)(exports.export)
app.command(rich_help_panel=AFTER)(compressions.compress)
app.command(rich_help_panel=AFTER)(serve.serve)
app.command(rich_help_panel=AFTER)(serve.rollback)
app.command("bench-serve", rich_help_panel=AFTER)(bench_serve.bench_serve)
app.command(rich_help_panel=AFTER)(predictions.predict)

runs_app = typer.Typer(help="List runs, compare them, send them elsewhere.", add_completion=False)
runs_app.command("diff")(run_commands.runs_diff)
runs_app.command("plot")(run_commands.runs_plot)
runs_app.command("export")(run_commands.runs_export)
runs_app.command("track")(run_commands.runs_track)
app.add_typer(runs_app, name="runs", rich_help_panel=TRAINING)
app.add_typer(data_check.data_app, name="data", rich_help_panel=BEFORE)

pool_app = typer.Typer(help="Other people's machines, lent by the hour.", no_args_is_help=True, add_completion=False)
pool_app.command("serve")(pool.pool_serve)
pool_app.command("offers")(pool.pool_offers)
pool_app.command("ledger")(pool.pool_ledger)
pool_app.command("wallet")(pool.pool_wallet)
pool_app.command("audit")(pool.pool_audit)
pool_app.command("team")(pool.pool_team)
pool_app.command("offer")(pool_agent.offer)
pool_app.command("pause")(pool_agent.pause)
pool_app.command("verify")(pool_agent.verify)
pool_app.command("dispute")(pool_agent.dispute)
pool_app.add_typer(pool_contract.contract_app, name="contract")
app.add_typer(pool_app, name="pool", rich_help_panel=ELSEWHERE)


runs_app.callback(invoke_without_command=True)(_command(run_commands.runs))
for _part in (runs_app, data_check.data_app, pool_app, pool_contract.contract_app, app):
    for _known in _part.registered_commands:
        assert _known.callback is not None
        _known.callback = _command(_known.callback)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line.

    Where the reader of its output has gone, as `head` does, it ends quietly, with the code of a program that SIGPIPE
    ends; so far Rich and Typer would exit with 1, and Python's flush at exit would complain.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # names that are not UTF-8, and terminals that know fewer letters
            with suppress(OSError):  # of a kind that cannot change any more
                stream.reconfigure(errors="backslashreplace")
    try:
        app(args=None if arguments is None else list(arguments))
    except SystemExit as ended:
        unread = [stream for stream in (sys.__stdout__, sys.__stderr__) if stream is not None and is_unread(stream)]
        if isinstance(ended.__context__, BrokenPipeError) or (unread and not ended.code):
            raise SystemExit(UNREAD) from None
        raise
