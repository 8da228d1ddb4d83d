"""`stoker train JOB --on ssh:box`: the options of runs elsewhere, and how one is started and followed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from stoker import api
from stoker.cli.elsewhere import follow_run
from stoker.cli.terminal import output, print_document, setting_pairs, teller, waiting
from stoker.errors import BadJob
from stoker.launching import parse_target
from stoker.records import to_json
from stoker.units import parse_duration, parse_memory, parse_money

if TYPE_CHECKING:
    from stoker.launching.launch_options import LaunchOptions

_ELSEWHERE = "Runs elsewhere"


def _elsewhere(*words: str, metavar: str | None = None, help_text: str) -> Any:
    """An option of `stoker train` for places elsewhere."""
    return typer.Option(*words, metavar=metavar, help=help_text, rich_help_panel=_ELSEWHERE)


Env = Annotated[
    str | None,
    _elsewhere(
        "--env",
        metavar="ENV",
        help_text="lock: the versions here, installed there once (default); theirs; or a path to a Python there.",
    ),
]
Image = Annotated[str | None, _elsewhere("--image", metavar="IMAGE", help_text="Container image to run in.")]
Secrets = Annotated[
    list[str] | None,
    _elsewhere("--secret", metavar="NAME", help_text="Environment variable to send, in no record; may be repeated."),
]
Send = Annotated[
    list[Path] | None, _elsewhere("--send", metavar="PATH", help_text="Another file or folder that the job reads.")
]
DataFiles = Annotated[
    list[Path] | None,
    _elsewhere("--data", metavar="PATH", help_text="Data: found there by its digest, else sent; may be repeated."),
]
Variables = Annotated[
    list[str] | None, _elsewhere("--var", metavar="NAME=VALUE", help_text="Environment variable to set there.")
]
PlaceOptions = Annotated[
    list[str] | None,
    _elsewhere("--place-option", metavar="NAME=VALUE", help_text="Option of the place, such as root=FOLDER."),
]
SendLimit = Annotated[
    str | None, _elsewhere("--send-limit", metavar="BYTES", help_text="Send no more than this (default: 10GiB).")
]
TimeLimit = Annotated[
    str | None,
    _elsewhere(
        "--time-limit",
        metavar="TIME",
        help_text="Save and stop before it has held devices for longer, over all starts that follow from this command.",
    ),
]
MaxCost = Annotated[
    str | None,
    _elsewhere(
        "--max-cost", metavar="USD", help_text="Save and stop before it costs more than this, with all earlier starts."
    ),
]
Deadline = Annotated[
    str | None, _elsewhere("--deadline", metavar="TIME", help_text="On a pool: the longest it may take, such as 12h.")
]
Verify = Annotated[
    str | None, _elsewhere("--verify", metavar="SHARE", help_text="On a pool: blocks that others replay (default: 5%).")
]
Detach = Annotated[bool, _elsewhere("--detach", help_text="Start it and return; `stoker attach RUN` shows it.")]
DryRun = Annotated[bool, _elsewhere("--dry-run", help_text="Print what would be submitted, and send nothing.")]


def require_possible_elsewhere(on: str, *, for_pools: Mapping[str, str | None], fork: str | None, ui: bool) -> None:
    """Refuse options of `stoker train` that the place `on` does not have.

    Raises:
        BadJob: `for_pools` (values by option) of another place than a pool, --fork, or --ui.
    """
    stray = next((option for option, value in for_pools.items() if value), None)
    if stray and on.replace("/", ":").partition(":")[0] != "pool":
        raise BadJob(f"{stray} is for pools, and {on} is none", remedy="Leave it out, or name a pool: --on pool.")
    if ui:
        raise BadJob(
            f"--ui shows a run on this machine, and {on} is elsewhere",
            remedy="Leave it out; `stoker ui` shows what has come back of the run.",
        )
    if fork:
        raise BadJob(
            f"--fork {fork} starts from a checkpoint here, which does not travel to {on}",
            remedy="Fork it here, or start a new run there without --fork.",
        )


def launch_options(
    given: Mapping[str, Any],
    arguments: Mapping[str, Any],
    *,
    run_dir: Path | None,
    plan_file: Path | None,
    new: bool,
    resume: str | None,
) -> LaunchOptions:
    """How a run is executed elsewhere, from the options of the command line.

    Args:
        given: options for places elsewhere, by name.
        arguments: options of `stoker train` that are passed on, by name.
        run_dir: the run's directory here.
        plan_file: a plan to train under.
        new: start another run even where one could be continued.
        resume: continue this run.

    Raises:
        BadJob: a value has another form; or options exclude each other.
        BadRun: there is no run to resume.
    """
    if sum(bool(choice) for choice in (new, resume, run_dir)) > 1:
        raise BadJob("--new, --resume and --run-dir exclude each other", remedy="Give one of them, or none.")
    _require_readable(arguments)
    passed: list[str] = []
    for option, value in arguments.items():
        if value is True:
            passed.append(option)
        elif value is not None and value is not False:
            passed += [word for item in (value if isinstance(value, list) else [value]) for word in (option, str(item))]
    pool_terms = {name: given[f"--{name}"] for name in ("verify", "deadline") if given[f"--{name}"]}
    return api.LaunchOptions(
        run_dir=api.find_launched(resume).path if resume else run_dir,
        new=new,
        env=given["--env"] or "lock",
        image=given["--image"] or "",
        secrets=tuple(given["--secret"] or ()),
        send=tuple(given["--send"] or ()),
        data=tuple(given["--data"] or ()),
        plan=plan_file,
        variables=setting_pairs(given["--var"], "--var"),
        place=setting_pairs(given["--place-option"], "--place-option") | pool_terms,
        arguments=tuple(passed),
        **({"send_limit": parse_memory(given["--send-limit"], "--send-limit")} if given["--send-limit"] else {}),
        max_cost=parse_money(given["--max-cost"]) if given["--max-cost"] else None,
        time_limit_s=parse_duration(given["--time-limit"], "--time-limit") if given["--time-limit"] else None,
    )


def _require_readable(arguments: Mapping[str, Any]) -> None:
    """Refuse values that no machine can read, before anything is sent; what depends on the machine is refused there.

    Raises:
        BadJob: one is of another form.
    """
    if arguments.get("--slice"):
        parse_duration(arguments["--slice"], "--slice")
    if arguments.get("--memory"):
        parse_memory(arguments["--memory"])
    for option in ("--threads", "--checkpoint-every", "--device-mtbf"):
        value = arguments.get(option)
        if value is not None and not 0 < value < math.inf:
            raise BadJob(f"{option} {value}: wanted a positive number")
    for word in arguments.get("--track") or ():
        api.require_tracker(word)


def train_elsewhere(
    job_file: Path,
    settings: list[str] | None,
    on: str,
    options: LaunchOptions,
    *,
    detach: bool,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Start a run elsewhere, or find it there, and follow it to its end unless it is detached."""
    target = parse_target(on)  # before torch is loaded
    named = setting_pairs(settings)
    if dry_run:
        with output(for_json=as_json), waiting("reading what would travel", quiet=as_json):
            text = api.describe_launch(job_file, on=on, settings=named, options=options)
        print_document({"script": text}) if as_json else print(text, end="")
        return
    console, tell = Console(stderr=True, highlight=False), teller(quiet=as_json)
    with output(for_json=as_json):
        question = api.PlaceQuestion(target, options)
        launched = api.launch(
            job_file, on=on, settings=named, options=options, tell=lambda text: tell(f"{text} …"), question=question
        )
    name = launched.directory.name
    if launched.because and not as_json:
        console.print(Text(launched.because), soft_wrap=True)
    if detach:
        if as_json:
            print_document(to_json(launched.launch))
        else:
            began = f"{name} was submitted to {on}; " if launched.is_new else ""
            console.print(
                Text(f"{began}`stoker attach {name}` shows it, `stoker stop {name}` saves and ends it"), soft_wrap=True
            )
        return
    raise typer.Exit(follow_run(launched.directory, as_json=as_json).exit_code)
