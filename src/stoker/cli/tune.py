"""`stoker tune`: a study in the terminal, its events as they happen, and its trials, best first."""

from __future__ import annotations

import itertools
import shlex
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from stoker import api
from stoker.cli.terminal import AsJson, Place, Settings, column_table, output, print_document, say, setting_pairs
from stoker.errors import BadJob
from stoker.records import to_json
from stoker.records.codec import JSON
from stoker.records.study import StudyResult, StudyTrial
from stoker.units import format_seconds, parse_duration


def tune(
    job_file: Annotated[
        Path | None, typer.Argument(metavar="JOB", help="A Python file with a function `job`.", show_default=False)
    ] = None,
    space: Annotated[
        list[str] | None,
        typer.Option(
            "--space", metavar="SPACE", help="lr=log(1e-4,1e-1) width=choice(16,32) depth=int(2,6), or a file."
        ),
    ] = None,
    settings: Settings = None,
    trials: Annotated[int, typer.Option("--trials", metavar="N", help="Configurations to try in all.")] = 20,
    sampler: Annotated[str, typer.Option("--sampler", help="What proposes them: grid, random, tpe, gp, pbt.")] = "tpe",
    pruner: Annotated[
        str | None,
        typer.Option(
            "--pruner",
            help="What gives them up early: none, asha, hyperband, median (default: asha; none for gp and pbt).",
        ),
    ] = None,
    intervals: Annotated[
        int | None,
        typer.Option(
            "--intervals", metavar="N", help="Of a population (pbt): how often the worst go on from the best."
        ),
    ] = None,
    objective: Annotated[
        str | None, typer.Option("--objective", metavar="METRIC", help="What is best, such as valid/accuracy.")
    ] = None,
    parallel: Annotated[str, typer.Option("--parallel", metavar="K", help="Trials at once: a number, or auto.")] = "1",
    on: Place = "here",
    storage: Annotated[
        str, typer.Option("--storage", metavar="URL", help="A database that several machines share: postgresql://…")
    ] = "",
    study: Annotated[str | None, typer.Option("--study", metavar="NAME", help="The study's name.")] = None,
    time: Annotated[
        str | None, typer.Option("--time", metavar="TIME", help="The longest this command may take: 30min, 2h.")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Other proposals with another one.")] = 0,
    plan_file: Annotated[Path | None, typer.Option("--plan", metavar="FILE", help="Use this plan for all.")] = None,
    planned: Annotated[
        int, typer.Option("--planned", metavar="N", min=0, help="Configurations to plan for the forecast.")
    ] = 3,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Stop at the forecast; nothing is written.")] = False,
    show: Annotated[str | None, typer.Option("--show", metavar="STUDY", help="Show a study as it stands.")] = None,
    as_json: AsJson = False,
) -> None:
    """Try settings of a job and find the best. Each trial is a real run; the same command again continues."""
    if show is not None:
        shown = api.study(show)
        if as_json:
            print_document(study_document(shown.result))
            return
        render_study(shown.result, Console())
        say(f"page: {shown.page_path}")
        return
    if job_file is None or not space:
        raise BadJob("what is to be tried?", remedy="Give JOB and --space, or --show STUDY.")

    options: dict[str, Any] = {
        "trials": trials,
        "sampler": sampler,
        "pruner": pruner,
        "objective": objective,
        "on": on,
        "seed": seed,
        "storage": storage,
        "study": study,
        "planned": planned,
        "parallel": parse_parallel(parallel),
        "intervals": intervals,
        "seconds": None if time is None else parse_seconds(time),
        "plan": plan_file,
    }
    with (
        output(for_json=as_json) as stdout,
        api.choose_display(subject="study", as_json=as_json, stdout=stdout, console=Console(stderr=True)) as display,
    ):
        done = api.tune(job_file, space, fixed=setting_pairs(settings), dry_run=dry_run, sink=display, **options)
    if not (as_json or dry_run):
        render_study(done.result, Console())


_MOST_ROWS = 20
_STYLES = {"finished": "", "handed on": "dim", "pruned": "dim", "running": "yellow", "failed": "red"}


def parse_seconds(text: str) -> float:
    """A time such as `90s`, `2h30min`, `1.5d`, or a number of seconds [s].

    Raises:
        BadJob: the text has another form.
    """
    try:
        return float(text)
    except ValueError:
        return parse_duration(text, "--time")


def parse_parallel(text: str) -> int | None:
    """Number of trials at once [trials]; None for `auto`.

    Raises:
        BadJob: the text has another form.
    """
    if text.strip().lower() == "auto":
        return None
    try:
        return int(text)
    except ValueError:
        raise BadJob(f"--parallel {text}: wanted auto, or a number of trials") from None


def render_study(result: StudyResult, console: Console) -> None:
    """Print a study's trials, best first, what mattered, and the command that trains the best settings."""
    console.print(_table(result))
    if len(result.trials) > _MOST_ROWS:
        console.print(Text(f"and {len(result.trials) - _MOST_ROWS} more; --json and the page have all", style="dim"))
    if result.importance:
        ordered = sorted(result.importance.items(), key=lambda item: -item[1])
        console.print(f"what mattered: {', '.join(f'{name} {share:.0%}' for name, share in ordered)}", highlight=False)
    best = result.best
    if best is not None and best.interval is not None:
        course = ", then ".join(describe_lineage(result, best))
        console.print(Text.assemble(("the best came about by ", "bold"), course), soft_wrap=True)
        console.print(
            Text.assemble(("its model: ", "bold"), f"the run {result.settings.name}/{best.run}"), soft_wrap=True
        )
    elif best is not None and result.settings.job.endswith(".py"):
        settings = {**result.settings.fixed, **best.parameters}
        arguments = [result.settings.job]
        for name, value in settings.items():
            arguments += ["--set", f"{name}={api.exact_setting(value)}"]
        command = f"stoker train {shlex.join(arguments)}"
        console.print(Text.assemble(("train the best: ", "bold"), command), soft_wrap=True)


def describe_lineage(result: StudyResult, trial: StudyTrial) -> list[str]:
    """What led to a trial of a population: settings, how far training went under them, and in which trials."""
    return [
        f"{api.format_settings(same[0].parameters)} up to {same[-1].curve[-1][0]:,} samples "
        f"(trial{'s' * (len(same) > 1)} {', '.join(str(trial.number) for trial in same)})"
        for _, group in itertools.groupby(result.lineage(trial.number), key=lambda trial: trial.parameters)
        if (same := list(group))
    ]


def study_document(result: StudyResult) -> dict[str, JSON]:
    """A study for `--json`: its record, with the trials best first."""
    document: dict[str, JSON] = to_json(result)
    best = result.best
    return {
        **document,
        "trials": [to_json(trial) for trial in result.ranked],
        "best": None if best is None else to_json(best),
        "samples": result.samples,
    }


def _table(result: StudyResult) -> Table:
    figures = (">trial", f">{result.settings.objective}", ">samples", ">time")
    populated = ["member/interval"] if result.settings.members else []
    table = column_table(*figures, *populated, "settings", "", folds={"settings", ""})
    for trial in result.ranked[:_MOST_ROWS]:
        cells: list[str | Text] = [
            str(trial.number),
            "" if trial.value is None else f"{trial.value:.4g}",
            f"{trial.samples:,}",
            format_seconds(trial.wall_s) if trial.wall_s else "",
        ]
        if members := result.settings.members:
            took_over = trial.parent is not None and trial.parent % members != trial.member
            cells.append(f"{trial.member}/{trial.interval}" + (f" from {trial.parent}" if took_over else ""))
        end = "" if trial.state == "finished" else trial.state
        reason = trial.reason.strip().partition("\n")[0]
        cells += [Text(api.format_settings(trial.parameters)), Text(": ".join(filter(None, (end, reason))))]
        table.add_row(*cells, style=_STYLES[trial.state])
    return table
