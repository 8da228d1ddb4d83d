"""`stoker bench-serve`: the rate that a service holds, the settings that hold it, and latencies at shares of it."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from stoker import api
from stoker.cli.terminal import AsJson, column_table, print_document
from stoker.errors import BadJob
from stoker.records import ServiceSettings, to_json
from stoker.records.service import LoadMeasurement, Objective, ServingLimit, SettingsTrial
from stoker.units import format_seconds

if TYPE_CHECKING:
    from stoker.loadtesting.load_test import Load


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
) -> None:
    """Find the rate a model's service holds within a latency, and the settings that hold it; or measure one rate."""
    if (models is None) == (url is None):
        raise BadJob("wanted MODELS to serve here, or --url of a server that runs; one of them")
    if url is not None and not model:
        raise BadJob(f"{url}: which model?", remedy="Add --model NAME.")
    api.require_libraries()
    if callers is not None and constant:
        raise BadJob("--constant is for a rate: each of --callers sends its next request once the last was answered")
    load = api.load_test.Load(
        inputs=inputs,
        rows=rows,
        sizes={name: many for word in sizes or () for name, many in api.sizes_of(word).items()},
        connections=connections,
        headers=parse_headers(headers or ()),
        is_constant=constant,
    )
    target, objective = _Target(models, url, model, load), None if slo is None else parse_objective(slo)
    console = None if as_json else Console()
    result: LoadMeasurement | ServingLimit | SettingsTrial
    if rate is not None or callers is not None:
        result = _measure(target, objective, rate, callers, seconds or _MEASURE_S, console)
    elif objective is None:
        raise BadJob("what is to be found?", remedy="Add --slo p99=20ms to search, or --rate or --callers to measure.")
    else:
        result = _search(target, objective, seconds or _SEARCH_S, console, writes=not dry_run)
    if as_json:
        print_document(to_json(result))


_SEARCH_S, _MEASURE_S = 180.0, 10.0
_BUSY_CORES = 0.2
_OBJECTIVE = re.compile(r"p(\d{1,2}(?:\.\d+)?)=(\d+(?:\.\d+)?)(us|µs|ms|s)")
_SECONDS = {"us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0}


class _Target(NamedTuple):
    """What is measured: models to serve here, or the URL of a server; its model; and the requests."""

    models: Path | None
    url: str | None
    model: str
    load: Load


def _measure(
    target: _Target,
    objective: Objective | None,
    rate: float | None,
    callers: int | None,
    seconds: float,
    console: Console | None,
) -> LoadMeasurement:
    models, url, model, load = target
    if models is not None:
        result = api.load_test.measure_models(
            models, rate=rate, callers=callers, seconds=seconds, model=model, objective=objective, load=load
        )
    else:
        assert url is not None
        result = api.load_test.measure_url(
            url, model, rate=rate, callers=callers, seconds=seconds, objective=objective, load=load
        )
    if console is not None:
        render_measurement(model or str(models), result, console)
    return result


def _search(
    target: _Target, objective: Objective, seconds: float, console: Console | None, *, writes: bool
) -> ServingLimit | SettingsTrial:
    models, url, model, load = target
    if models is None:
        assert url is not None
        trial = api.load_test.highest_rate_of_url(url, model, objective, seconds=seconds, load=load)
        if console is not None:
            render_rate(model, objective, trial, console)
        return trial
    result = api.load_test.bench_serve(
        models,
        objective,
        model=model,
        seconds=seconds,
        load=load,
        writes=writes,
        on_trial=lambda trial: None if console is None else console.print(trial_line(trial, objective), soft_wrap=True),
    )
    if console is not None:
        render_limit(result, console)
    return result


def parse_objective(word: str) -> Objective:
    """The latency objective that `p99=20ms` stands for.

    Raises:
        BadJob: the text has another form.

    >>> parse_objective("p99=20ms")
    Objective(q=0.99, within_s=0.02)
    """
    match = _OBJECTIVE.fullmatch(word.strip())
    if match is None or not float(match[1]) > 0 or not float(match[2]) > 0:
        raise BadJob(f"--slo {word}: wanted a quantile and a time, such as p99=20ms or p99.9=0.5s")
    return Objective(q=round(float(match[1]) / 100, 9), within_s=float(match[2]) * _SECONDS[match[3]])


def parse_headers(words: Sequence[str]) -> dict[str, str]:
    """Headers from words such as `Authorization: Bearer KEY`.

    Raises:
        BadJob: a word has no colon.
    """
    parts = {word: word.partition(":") for word in words}
    for word, (name, colon, _) in parts.items():
        if not (colon and name.strip()):
            raise BadJob(f"--header {word}: wanted NAME: VALUE")
    return {name.strip(): value.strip() for name, _, value in parts.values()}


def render_measurement(title: str, measured: LoadMeasurement, console: Console) -> None:
    """Print one measurement: rates, latencies with intervals, failures, and whether to trust it."""
    how = f"{measured.rate:.4g} requests/s asked" if measured.rate is not None else f"{measured.connections} callers"
    console.print(Text.assemble((title, "bold"), f"  {how}, {measured.requests:,} requests"), soft_wrap=True)
    rates = f"{measured.throughput:.4g} answers/s"
    if measured.rows != measured.answered and measured.duration_s > 0:
        rates += f" ({measured.rows / measured.duration_s:.4g} rows/s)"
    if measured.held is not None:
        rates += f", {measured.goodput:.4g} of them good: objective {measured.held}"
    costs = f"asking cost {format_seconds(measured.generator.cpu_s_per_request)} of CPU each"
    if measured.server_cpu_s is not None and measured.answered:
        costs += f", answering {format_seconds(measured.server_cpu_s / measured.answered)}"
    console.print(Text(f"{rates}; {costs}"), soft_wrap=True)
    table = column_table(">latency", ">", ">95 % interval")
    for quantile in measured.quantiles:
        table.add_row(
            f"p{quantile.q * 100:g}", _time(quantile.seconds), f"{_time(quantile.low)} – {_time(quantile.high)}"
        )
    console.print(table)
    print_notes([measured], console)


def print_notes(measurements: Sequence[LoadMeasurement], console: Console) -> None:
    """Print failures and warnings, each once."""
    failures = [f"{count:,} × {what}" for measurement in measurements for what, count in measurement.failures.items()]
    if failures:
        console.print(Text.assemble(("failed:  ", "bold red"), ", ".join(failures)), soft_wrap=True)
    for warning in dict.fromkeys(warning for measurement in measurements for warning in measurement.warnings):
        console.print(Text.assemble(("warning: ", "bold yellow"), warning), soft_wrap=True)


def trial_line(trial: SettingsTrial, objective: Objective) -> Text:
    """One trial as it ends: `instances 1 × threads 2, batch 32, delay 0   612 requests/s`."""
    held = f"{trial.rate:.4g} requests/s within {objective}" if trial.rate else trial.why
    return Text.assemble((settings_words(trial.settings).ljust(58), ""), (held, "" if trial.rate else "dim"))


def render_rate(name: str, objective: Objective, trial: SettingsTrial, console: Console) -> None:
    """Print the highest rate of a server that was running already, and what was measured on the way."""
    console.print(Text.assemble((name, "bold"), f"  {_headline(trial, objective)}"), soft_wrap=True)
    console.print(Text(trial.why, "dim"), soft_wrap=True)
    console.print(_levels([level for level in trial.tried if level.loop == "open"]))
    print_notes([measurement for measurement in trial.tried if measurement.held == "held"], console)


def render_limit(limit: ServingLimit, console: Console) -> None:
    """Print the rate and the settings that hold it, the gain over the default ones, and latencies at shares of it."""
    console.print()
    headline = _headline(limit.chosen, limit.objective)
    console.print(Text.assemble((limit.model, "bold"), f"  {headline}   ({limit.machine})"), soft_wrap=True)
    console.print(Text.assemble(("settings: ", "dim"), settings_words(limit.chosen.settings)), soft_wrap=True)
    if limit.default.rate and limit.chosen.settings != limit.default.settings:
        gain = f"{limit.chosen.rate / limit.default.rate:.2f}x"
        console.print(Text(f"the default ones held {limit.default.rate:.4g} requests/s: {gain}", "dim"))
    tried = f"{len(limit.trials)} settings tried in {format_seconds(limit.took_s)}"
    ended = "nothing better is near" if limit.is_complete else "the time left was too short to try the others"
    console.print(Text(f"{limit.chosen.why}; {tried}, {ended}", "dim"), soft_wrap=True)
    levels = limit.levels or [measurement for measurement in limit.chosen.tried if measurement.loop == "open"]
    if levels:
        console.print(_levels(levels))
    print_notes(limit.levels, console)
    if limit.others_cores > _BUSY_CORES:
        others = f"other programs kept {limit.others_cores:.1f} cores busy: measure again on a quiet machine"
        console.print(Text.assemble(("warning: ", "bold yellow"), others), soft_wrap=True)
    if limit.written_to:
        console.print(Text(f"written to {limit.written_to}; `stoker serve` loads it"), soft_wrap=True)


def settings_words(settings: ServiceSettings | None) -> str:
    """`instances 1 × threads 2, batch 32, delay 0`."""
    if settings is None:
        return "as the server runs"
    layout = f"instances {settings.instances or 'auto'} × threads {settings.threads or 'auto'}"
    delay = format_seconds(settings.max_delay_s) if settings.max_delay_s else "0"
    return f"{layout}, batch {settings.max_batch_rows}, delay {delay}"


def _headline(trial: SettingsTrial, objective: Objective) -> str:
    if trial.rate:
        return f"holds {trial.rate:.4g} requests/s within {objective}"
    return f"held no rate within {objective}"


def _levels(measurements: Sequence[LoadMeasurement]) -> Table:
    titles = (">asked/s", ">answered/s", ">good/s", ">p50", ">p90", ">p99", ">p99 at most", ">held")
    table = column_table(*titles, folds=titles)
    for measurement in measurements:
        p50, p90, p99 = (measurement.quantile(q) for q in (0.5, 0.9, 0.99))
        times = [_time(value) for value in (p50.seconds, p90.seconds, p99.seconds, p99.high)]
        held = "cut short" if measurement.was_cut else measurement.held or ""
        table.add_row(
            f"{measurement.rate:.4g}", f"{measurement.throughput:.4g}", f"{measurement.goodput:.4g}", *times, held
        )
    return table


def _time(value_s: float) -> str:
    if math.isnan(value_s):
        return "none"
    return "unbounded" if math.isinf(value_s) else format_seconds(value_s)
