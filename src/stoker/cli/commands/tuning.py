"""The command that searches settings."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from stoker.cli.options import AsJson, Debug, Place, Settings
from stoker.cli.terminal import output, print_document, reported
from stoker.errors import BadJob


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
    debug: Debug = False,
) -> None:
    """Try settings of a job and find the best. Each trial is a real run; the same command again continues."""
    with reported(debug=debug):
        if show is not None:
            _show(show, as_json=as_json)
            return
        if job_file is None or not space:
            raise BadJob("what is to be tried?", remedy="Give JOB and --space, or --show STUDY.")
        from stoker.cli.tunings import parse_parallel, parse_seconds

        options: dict[str, Any] = {
            "trials": trials, "sampler": sampler, "pruner": pruner, "objective": objective, "on": on, "seed": seed,
            "storage": storage, "study": study, "planned": planned, "parallel": parse_parallel(parallel),
            "intervals": intervals, "seconds": None if time is None else parse_seconds(time), "plan": plan_file,
        }  # fmt: skip
        _tune(job_file, space, settings, dry_run=dry_run, as_json=as_json, options=options)


def _tune(
    job_file: Path, space: list[str], settings: list[str] | None, *, dry_run: bool, as_json: bool,
    options: dict[str, Any],
) -> None:  # fmt: skip
    from stoker import flow
    from stoker.cli.terminal import setting_pairs
    from stoker.cli.tunings import render_study, study_display

    with (
        output(for_json=as_json) as stdout,
        study_display(as_json=as_json, stdout=stdout, console=Console(stderr=True)) as display,
    ):
        done = flow.tune(job_file, space, fixed=setting_pairs(settings), dry_run=dry_run, sink=display, **options)
    if not (as_json or dry_run):
        render_study(done.result, Console())


def _show(word: str, *, as_json: bool) -> None:
    from stoker import flow
    from stoker.cli.tunings import render_study, study_document

    found = flow.study(word)
    if as_json:
        print_document(study_document(found.result))
        return
    render_study(found.result, Console())
    Console().print(f"page: {found.page_path}", highlight=False, markup=False, soft_wrap=True)
