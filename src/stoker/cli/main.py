"""The command line: it starts flows and renders records; it decides nothing about training."""

from __future__ import annotations

from collections.abc import Sequence

import typer

from stoker.cli.commands import data, jobs, machines, models, runs, services, tuning

app = typer.Typer(
    name="stoker",
    help="Work out what a training job needs, train it at the limit of the device, and prove that it learned the same.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)

app.command()(machines.doctor)
app.command()(jobs.plan)
app.command()(jobs.train)
app.command("take-part", hidden=True)(jobs.take_part)
app.command()(jobs.verify)
app.command("lr-range")(jobs.lr_range)
app.command()(tuning.tune)
app.command()(runs.report)
app.command()(models.export)
app.command()(models.compress)
app.command()(services.serve)
app.command("bench-serve")(services.bench_serve)
app.command()(models.predict)
app.command()(machines.devices)
app.command()(machines.prices)

runs_app = typer.Typer(help="List runs, compare them, send them elsewhere.", add_completion=False)
runs_app.callback(invoke_without_command=True)(runs.runs)
runs_app.command("diff")(runs.runs_diff)
runs_app.command("plot")(runs.runs_plot)
runs_app.command("export")(runs.runs_export)
runs_app.command("track")(runs.runs_track)
app.add_typer(runs_app, name="runs")
app.add_typer(data.data_app, name="data")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    app(args=None if arguments is None else list(arguments))
