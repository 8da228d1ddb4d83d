"""`stoker plan`, `train`, `verify` and `lr-range`: commands that take a job, and what the last two found."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from stoker import api, cli
from stoker.activity import doing
from stoker.cli.terminal import (
    AsJson,
    DeviceMtbf,
    JobFile,
    Memory,
    Network,
    Objective,
    PinnedPlan,
    Place,
    Places,
    PlanFile,
    PreemptedEvery,
    Settings,
    Threads,
    column_table,
    load_job,
    output,
    print_document,
    waiting,
)
from stoker.cli.train_elsewhere import (
    DataFiles,
    Deadline,
    Detach,
    DryRun,
    Env,
    Image,
    MaxCost,
    PlaceOptions,
    Secrets,
    Send,
    SendLimit,
    TimeLimit,
    Variables,
    Verify,
    launch_options,
    require_possible_elsewhere,
    train_elsewhere,
)
from stoker.cli.ui import local_page
from stoker.errors import BadJob, PlaceFailed, RunFailed
from stoker.launching import is_elsewhere
from stoker.records import Verdict, to_json
from stoker.units import format_seconds, parse_duration, parse_money, seconds

if TYPE_CHECKING:
    from stoker.tuning.lr_range_test import LrRange


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
    slice_length: Annotated[
        str | None, typer.Option("--slice", metavar="TIME", help="Say how many slices of this length it takes.")
    ] = None,
    pinned: PinnedPlan = None,
    network: Network = None,
    preempted_every: PreemptedEvery = None,
    explain: Annotated[
        bool, typer.Option("--explain", help="Show where bytes and time go, and what each rejected plan lost by.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Choose device and settings for a job, and forecast memory, time, energy and money before anything is spent."""
    cli.plan_table.print_catalogue_problems(Console(stderr=True, highlight=False))
    if any(is_elsewhere(word) for word in on.split(",")):
        of_devices = {
            "--plan": pinned,
            "--network": network,
            "--preempted-every": preempted_every,
            "--slice": slice_length,
            "--explain": explain,
        }
        if stray := next((option for option, value in of_devices.items() if value), None):
            raise BadJob(
                f"{stray} is for devices, and --on {on} compares places elsewhere",
                remedy="Leave it out, or name devices alone, such as --on here,h100.",
            )
        limits = api.PlanLimits(
            max_cost_usd=parse_money(max_cost) if max_cost else None,
            deadline_s=parse_duration(deadline) if deadline else None,
        )
        with output(for_json=as_json), waiting("asking the places, and forecasting", quiet=as_json):
            job, entry = load_job(job_file, settings)
            comparison = api.compare_places(
                job,
                on=on,
                entry=entry,
                limits=limits,
                objective=objective,
                memory=memory,
                threads=threads,
                device_mtbf_h=device_mtbf,
            )
        if as_json:
            print_document(to_json(comparison))
        else:
            cli.place_table.render_comparison(comparison, Console())
        if all(offer.problem for offer in comparison.offers):
            raise typer.Exit(PlaceFailed.exit_code)
        return
    with output(for_json=as_json), waiting("working out what the job needs", quiet=as_json):
        job, entry = load_job(job_file, settings)
        decision = api.plan(
            job,
            on=on,
            max_cost=max_cost,
            deadline=deadline,
            entry=entry,
            objective=objective,
            memory=memory,
            threads=threads,
            device_mtbf_h=device_mtbf,
            slice=slice_length,
            plan=pinned or None,
            network=network,
            preempted_every=preempted_every,
        )
    if as_json:
        print_document(to_json(decision))
    else:
        cli.plan_table.render_decision(decision, Console(), explain=explain)


def train(
    job_file: JobFile,
    settings: Settings = None,
    on: Annotated[
        str,
        typer.Option(
            "--on",
            metavar="PLACE",
            help="The device: here, cpu, cuda:0, …; 2xhere: two processes; ssh:HOST, slurm:…, …: elsewhere.",
        ),
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
            "--track",
            metavar="TRACKER",
            help="Show the run there too: tensorboard, mlflow=URI, wandb, trackio, prometheus=URL, csv.",
        ),
    ] = None,
    keep: Annotated[
        str | None,
        typer.Option(
            "--keep", metavar="URL", help="Mirror the run there, such as s3://bucket/runs, and go on from it."
        ),
    ] = None,
    slice_length: Annotated[
        str | None,
        typer.Option("--slice", metavar="TIME", help="Save and exit with 75 before this is over, such as 50min."),
    ] = None,
    site: Annotated[
        str | None, typer.Option("--site", metavar="K/N", help="Which site of Job(sync=…) this is; with --exchange.")
    ] = None,
    exchange: Annotated[
        Path | None,
        typer.Option("--exchange", metavar="DIR", help="Folder of the messages between sites without a network."),
    ] = None,
    env: Env = None,
    image: Image = None,
    secret: Secrets = None,
    send: Send = None,
    data: DataFiles = None,
    variable: Variables = None,
    place_option: PlaceOptions = None,
    send_limit: SendLimit = None,
    time_limit: TimeLimit = None,
    max_cost: MaxCost = None,
    deadline: Deadline = None,
    verify: Verify = None,
    detach: Detach = False,
    dry_run: DryRun = False,
    with_ui: Annotated[bool, typer.Option("--ui", help="Show the run on a local page while it trains.")] = False,
    as_json: AsJson = False,
) -> None:
    """Plan a job, train it, report. The same command again continues what was cut off."""
    given = {
        "--env": env,
        "--image": image,
        "--secret": secret,
        "--send": send,
        "--data": data,
        "--var": variable,
        "--place-option": place_option,
        "--send-limit": send_limit,
        "--time-limit": time_limit,
        "--max-cost": max_cost,
        "--deadline": deadline,
        "--verify": verify,
        "--detach": detach,
        "--dry-run": dry_run,
    }
    if is_elsewhere(on):
        require_possible_elsewhere(on, for_pools={"--deadline": deadline, "--verify": verify}, fork=fork, ui=with_ui)
        arguments = {
            "--checkpoint-every": checkpoint_every,
            "--device-mtbf": device_mtbf,
            "--memory": memory,
            "--threads": threads,
            "--profile": profile,
            "--track": track,
            "--keep": keep,
            "--slice": slice_length,
            "--site": site,
            "--exchange": exchange,
        }
        options = launch_options(given, arguments, run_dir=run_dir, plan_file=plan_file, new=new, resume=resume)
        train_elsewhere(job_file, settings, on, options, detach=detach, dry_run=dry_run, as_json=as_json)
        return
    if stray := next((option for option, value in given.items() if value), None):
        raise BadJob(
            f"{stray} is for runs elsewhere, and {on} is on this machine",
            remedy="Name a place such as --on ssh:me@box, or drop it.",
        )
    if profile:  # read when torch is loaded: its profiler would write into the live display
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    if checkpoint_every is not None and not math.isfinite(checkpoint_every):
        raise BadJob(f"--checkpoint-every {checkpoint_every}: wanted a number of seconds, such as 3600")
    every = None if checkpoint_every is None else seconds(checkpoint_every)
    with output(for_json=as_json) as stdout:
        with doing("loading the job file"):
            job, entry = load_job(job_file, settings)
        with (
            local_page(with_ui, run_dir),
            api.choose_display(as_json=as_json, stdout=stdout, console=Console(stderr=True)) as display,
        ):
            run = api.train(
                job,
                on=on,
                run_dir=run_dir,
                plan=plan_file,
                new=new,
                resume=resume,
                fork=fork,
                checkpoint_every=every,
                device_mtbf_h=device_mtbf,
                memory=memory,
                threads=threads,
                profile=profile,
                entry=entry,
                sink=display,
                track=track or (),
                keep=keep,
                slice=slice_length,
                site=site,
                exchange=exchange,
            )
    if run.exit_code:
        raise typer.Exit(run.exit_code)


def take_part(
    directory: Path,
    job_file: JobFile,
    settings: Settings = None,
    slice_: Annotated[str | None, typer.Option("--slice")] = None,
) -> None:
    """Train a run as one of the processes that `stoker train --on 2xhere` starts."""
    job, entry = load_job(job_file, settings)
    raise typer.Exit(api.take_part_in(directory, job, entry, slice_))


def verify(job_file: JobFile, settings: Settings = None, on: Place = "here", as_json: AsJson = False) -> None:
    """Examine the exactness contract for a job: separable? exact on resume? equal under its plan?"""
    with output(for_json=as_json), waiting("examining the job", quiet=as_json):
        job, entry = load_job(job_file, settings)
        verdicts = api.verify(job, on=on, entry=entry)
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
) -> None:
    """Find the learning rates a job bears, in a few hundred updates that are thrown away; nothing is changed."""
    with output(for_json=as_json), waiting("trying learning rates", quiet=as_json):
        job, entry = load_job(job_file, settings)
        result = api.lr_range(job, on=on, updates=updates, seeds=seeds, seconds=seconds, plan=plan_file, entry=entry)
    if as_json:
        print_document(to_json(result))
    else:
        render_lr_range(job.name or job_file.stem, result, Console())


_BLOCKS = "▁▂▃▄▅▆▇█"
_WIDTH = 60
"""Columns of the picture at most; as many rates share one as are needed."""


def render_lr_range(name: str, result: LrRange, console: Console) -> None:
    """Print the suggestion with its reason, the picture of the loss over the rates, and each seed's edge."""
    console.print(Text.assemble((name, "bold"), f"  learning rates it bears at batch {result.batch:,}"))
    console.print()
    style = "bold" if result.is_clear else "bold yellow"
    console.print(Text.assemble(("lr ", style), (f"{result.lr:.3g}", style), f"   {result.why}"), soft_wrap=True)
    console.print(
        Text(f"good progress from {result.low:.3g} to {result.high:.3g}; the job says {result.stated_lr:.3g}")
    )
    console.print()
    losses = result.mean_losses()
    row = blocks(losses, min(_WIDTH, console.width - 8))
    if row and not console.options.ascii_only:
        console.print(Text.assemble("loss  ", (row, "cyan")))
        ends = f"{result.rates[0]:.0e}".ljust(len(row) - 6) + f"{result.rates[len(losses) - 1]:.0e}".rjust(6)
        console.print(Text(f"rate  {ends}", "dim"))
        console.print()
    table = column_table(">seed", ">updates", ">lowest loss", ">runs away at")
    for sweep in result.sweeps:
        edge = "not seen" if sweep.edge is None else f"{sweep.edge:.3g}"
        lowest = f"{min(sweep.losses):.4g}" if sweep.losses else "-"
        table.add_row(str(sweep.seed), str(len(sweep.losses) + 1), lowest, edge)
    console.print(table)
    console.print()
    amount = f"{result.num_updates} updates of {result.batch:,} samples, thrown away"
    console.print(
        Text(f"{amount}; {format_seconds(result.took_s)} with planning. Nothing was changed.", "dim"), soft_wrap=True
    )


def blocks(losses: tuple[float, ...], width: int) -> str:
    """The losses as a row of at most `width` block characters; from the first loss on, all are full.

    >>> blocks((1.0, 0.5, 0.0, 9.0), 4)
    '█▄▁█'
    """
    if not losses:
        return ""
    each = math.ceil(len(losses) / width)
    columns = [losses[start : start + each] for start in range(0, len(losses), each)]
    top = losses[0]
    means = [min(sum(column) / len(column), top) for column in columns]
    low = min(means)
    span = top - low
    return "".join(_BLOCKS[int(7 * (mean - low) / span)] if span > 0 else _BLOCKS[0] for mean in means)


def render_verdicts(name: str, verdicts: Sequence[Verdict], *, console: Console) -> None:
    """Print each question with a check mark or a cross, its answer and its evidence; the last line sums them up.

    The last verdict is the level that the others leave.
    """
    console.print(Text.assemble((name, "bold"), "  what holds for this job"))
    console.print()
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True)
    grid.add_column()
    for verdict in verdicts:
        mark = ("✓", "bold green") if verdict.passed else ("✗", "bold red")
        level = f"  {verdict.level}" if verdict.level != "none" else ""
        grid.add_row(Text(*mark), Text.assemble((verdict.question, "bold"), (level, "cyan")))
        grid.add_row("", Text(verdict.answer))
        if verdict.evidence:
            grid.add_row("", Text(verdict.evidence, style="dim"))
    console.print(grid)
    console.print()
    *examined, holding = verdicts
    failed = sum(not verdict.passed for verdict in examined)
    if failed or not holding.passed:
        text = f"{failed} of {len(examined)} did not hold: no level is promised until they do"
        console.print(Text(text, style="bold red"))
    else:
        console.print(Text.assemble(("holds: ", "bold green"), holding.answer))
