"""The command line: it starts flows and renders records; it decides nothing about training."""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Annotated

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
from stoker.cli.terminal import command
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


@app.callback()
def stoker(
    _version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and stop.")
    ] = False,
) -> None:
    """Work out what a training job needs, train it at the limit of the device, and prove that it learned the same."""


app.command(rich_help_panel=BEFORE)(command(jobs.plan))
app.command(rich_help_panel=BEFORE)(command(machines.doctor))
app.command(rich_help_panel=BEFORE)(command(machines.devices))
app.command(rich_help_panel=BEFORE)(command(machines.prices))
app.command("lr-range", rich_help_panel=BEFORE)(command(jobs.lr_range))
app.command(rich_help_panel=TRAINING)(command(jobs.train))
app.command("take-part", hidden=True)(command(jobs.take_part))
app.command(rich_help_panel=TRAINING)(command(jobs.verify))
app.command(rich_help_panel=TRAINING)(command(tune.tune))
app.command(rich_help_panel=TRAINING)(command(run_commands.report))
app.command(rich_help_panel=ELSEWHERE)(command(elsewhere.places))
app.command(rich_help_panel=ELSEWHERE)(command(elsewhere.logs))
app.command(rich_help_panel=ELSEWHERE)(command(elsewhere.attach))
app.command(rich_help_panel=ELSEWHERE)(command(elsewhere.stop))
app.command(rich_help_panel=ELSEWHERE)(command(elsewhere.fetch))
app.command(rich_help_panel=ELSEWHERE)(command(images.image))
app.command(rich_help_panel=TRAINING)(command(ui.ui))
app.command(rich_help_panel=AFTER)(command(exports.export))
app.command(rich_help_panel=AFTER)(command(compressions.compress))
app.command(rich_help_panel=AFTER)(command(serve.serve))
app.command(rich_help_panel=AFTER)(command(serve.rollback))
app.command("bench-serve", rich_help_panel=AFTER)(command(bench_serve.bench_serve))
app.command(rich_help_panel=AFTER)(command(predictions.predict))

runs_app = typer.Typer(help="List runs, compare them, send them elsewhere.", add_completion=False)
runs_app.callback(invoke_without_command=True)(command(run_commands.runs))
runs_app.command("diff")(command(run_commands.runs_diff))
runs_app.command("plot")(command(run_commands.runs_plot))
runs_app.command("export")(command(run_commands.runs_export))
runs_app.command("track")(command(run_commands.runs_track))
app.add_typer(runs_app, name="runs", rich_help_panel=TRAINING)
app.add_typer(data_check.data_app, name="data", rich_help_panel=BEFORE)

pool_app = typer.Typer(help="Other people's machines, lent by the hour.", no_args_is_help=True, add_completion=False)
pool_app.command("serve")(command(pool.pool_serve))
pool_app.command("offers")(command(pool.pool_offers))
pool_app.command("ledger")(command(pool.pool_ledger))
pool_app.command("wallet")(command(pool.pool_wallet))
pool_app.command("audit")(command(pool.pool_audit))
pool_app.command("team")(command(pool.pool_team))
pool_app.command("offer")(command(pool_agent.offer))
pool_app.command("pause")(command(pool_agent.pause))
pool_app.command("verify")(command(pool_agent.verify))
pool_app.command("dispute")(command(pool_agent.dispute))
pool_app.add_typer(pool_contract.contract_app, name="contract")
app.add_typer(pool_app, name="pool", rich_help_panel=ELSEWHERE)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # names that are not UTF-8, and terminals that know fewer letters
            with suppress(OSError):  # of a kind that cannot change any more
                stream.reconfigure(errors="backslashreplace")
    app(args=None if arguments is None else list(arguments))
