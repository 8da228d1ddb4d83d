"""Commands that take a job."""

from __future__ import annotations

import math
import os
from datetime import date
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from stoker.cli.options import (
    AsJson,
    Debug,
    DeviceMtbf,
    JobFile,
    Memory,
    Objective,
    Place,
    Places,
    PlanFile,
    Settings,
    Threads,
)
from stoker.cli.terminal import INTERRUPTED, load_job, output, print_document, reported, waiting
from stoker.errors import BadJob, RunFailed
from stoker.records import to_json


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
    threads: Threads = None,
    device_mtbf: DeviceMtbf = None,
    explain: Annotated[
        bool, typer.Option("--explain", help="Show where bytes and time go, and what each rejected plan lost by.")
    ] = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Choose device and settings for a job, and forecast memory, time, energy and money before anything is spent."""
    with reported(debug=debug):
        from stoker import flow
        from stoker.cli.plans import render_decision

        _warn_of_bad_rows()
        with output(for_json=as_json), waiting("working out what the job needs", quiet=as_json):
            job, entry = load_job(job_file, settings)
            decision = flow.plan(
                job,
                on=on,
                max_cost=max_cost,
                deadline=deadline,
                entry=entry,
                objective=objective,
                memory=memory,
                threads=threads,
                device_mtbf_h=device_mtbf,
            )
        if as_json:
            print_document(to_json(decision))
        else:
            render_decision(decision, Console(), explain=explain)


def train(
    job_file: JobFile,
    settings: Settings = None,
    on: Annotated[
        str, typer.Option("--on", metavar="PLACE", help="The device: here, cpu, cuda:0, …; 2xhere: two processes.")
    ] = "here",
    run_dir: Annotated[Path | None, typer.Option("--run-dir", metavar="DIR", help="The run's directory.")] = None,
    plan_file: PlanFile = None,
    new: Annotated[bool, typer.Option("--new", help="Start another run even if one could be continued.")] = False,
    resume: Annotated[
        str | None, typer.Option("--resume", metavar="RUN", help="Continue this run and no other.")
    ] = None,
    fork: Annotated[
        str | None, typer.Option("--fork", metavar="RUN", help="Start a new run from this one's last checkpoint.")
    ] = None,
    checkpoint_every: Annotated[
        float | None, typer.Option("--checkpoint-every", metavar="SECONDS", min=0.001, help="Time between checkpoints.")
    ] = None,
    device_mtbf: DeviceMtbf = None,
    memory: Memory = None,
    threads: Threads = None,
    profile: Annotated[
        bool, typer.Option("--profile", help="Profile a few updates, line by line; see the report.")
    ] = False,
    track: Annotated[
        list[str] | None,
        typer.Option(
            "--track", metavar="TRACKER", help="Show the run there too: tensorboard, mlflow=URI, wandb, trackio, csv."
        ),
    ] = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Plan a job, train it, report. The same command again continues what was cut off."""
    with reported(debug=debug):
        if profile:  # read when torch is loaded: its profiler would write into the live display
            os.environ.setdefault("KINETO_LOG_LEVEL", "99")
            os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        if sum(bool(choice) for choice in (new, resume, fork)) > 1:
            raise BadJob("--new, --resume and --fork exclude each other", remedy="Give one of them, or none.")
        from stoker import flow, units
        from stoker.reporting.display import choose_display

        every = None if checkpoint_every is None else units.seconds(_finite(checkpoint_every))
        with output(for_json=as_json) as stdout:
            job, entry = load_job(job_file, settings)
            with choose_display(as_json=as_json, stdout=stdout, console=Console(stderr=True)) as display:
                run = flow.train(
                    job, on=on, run_dir=run_dir, plan=plan_file, new=new, resume=resume, fork=fork,
                    checkpoint_every=every, device_mtbf_h=device_mtbf, memory=memory, threads=threads, profile=profile,
                    entry=entry, sink=display, track=track or (),
                )  # fmt: skip
        if run.status == "unfinished":
            raise typer.Exit(INTERRUPTED)


def take_part(directory: Path, job_file: JobFile, settings: Settings = None, debug: Debug = False) -> None:
    """Train a run as one of the processes that `stoker train --on 2xhere` starts."""
    with reported(debug=debug):
        from stoker import flow

        job, entry = load_job(job_file, settings)
        raise typer.Exit(flow.take_part_in(directory, job, entry))


def verify(
    job_file: JobFile, settings: Settings = None, on: Place = "here", as_json: AsJson = False, debug: Debug = False
) -> None:
    """Examine the exactness contract for a job: separable? exact on resume? equal under its plan?"""
    with reported(debug=debug):
        from stoker import flow
        from stoker.cli.verdicts import render_verdicts

        with output(for_json=as_json), waiting("examining the job", quiet=as_json):
            job, entry = load_job(job_file, settings)
            verdicts = flow.verify(job, on=on, entry=entry)
        if as_json:
            print_document({"verdicts": to_json(verdicts), "passed": all(v.passed for v in verdicts)})
        else:
            render_verdicts(job.name or job_file.stem, verdicts, console=Console())
        if not all(verdict.passed for verdict in verdicts):
            raise typer.Exit(RunFailed.exit_code)


def lr_range(
    job_file: JobFile,
    settings: Settings = None,
    on: Place = "here",
    updates: Annotated[int, typer.Option("--updates", help="Updates of one sweep.")] = 100,
    seeds: Annotated[int, typer.Option("--seeds", help="Sweeps, each with a seed of its own.")] = 2,
    seconds: Annotated[float, typer.Option("--seconds", help="The longest all sweeps together may take.")] = 120.0,
    plan_file: PlanFile = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Find the learning rates a job bears, in a few hundred updates that are thrown away; nothing is changed."""
    with reported(debug=debug):
        from stoker import flow
        from stoker.cli.lr_range import render_lr_range

        with output(for_json=as_json), waiting("trying learning rates", quiet=as_json):
            job, entry = load_job(job_file, settings)
            found = flow.lr_range(
                job, on=on, updates=updates, seeds=seeds, seconds=seconds, plan=plan_file, entry=entry
            )
        if as_json:
            print_document(to_json(found))
        else:
            render_lr_range(job.name or job_file.stem, found, Console())


def _finite(seconds: float) -> float:
    if not math.isfinite(seconds):
        raise BadJob(f"--checkpoint-every {seconds}: wanted a number of seconds, such as 3600")
    return seconds


def _warn_of_bad_rows() -> None:
    """Name, on standard error, the rows of the user's catalogue and price files that cannot be used."""
    from stoker.devices import catalogue, price_list

    console = Console(stderr=True, highlight=False)
    today = date.today()  # noqa: DTZ011 - the user's day
    for problem in dict.fromkeys((*catalogue().problems, *price_list(today).problems)):
        console.print(Text.assemble(("warning: ", "bold yellow"), problem), soft_wrap=True)
