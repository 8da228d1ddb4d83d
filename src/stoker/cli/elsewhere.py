"""`stoker places`, `logs`, `attach`, `stop` and `fetch`: runs that are executed elsewhere."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated, Any, Literal, TextIO

import typer
from rich.console import Console
from rich.text import Text

from stoker import api
from stoker.cli.terminal import (
    AsJson,
    RunWord,
    column_table,
    output,
    print_document,
    print_table,
    printable,
    say,
    waiting,
)
from stoker.errors import BadRun, PlaceFailed, StokerError
from stoker.records import Event, to_json
from stoker.units import format_money, format_seconds

if TYPE_CHECKING:
    from stoker.launching.follow import Followed
    from stoker.launching.known_places import KnownPlace
    from stoker.records.codec import JSON
    from stoker.store import RunDirectory


def places(
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="[PLACE]...", help="Words of --on to ask; default: places used before."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show where runs can be executed: kinds of places, which answer, what they lack, what earlier runs showed."""
    with waiting("asking the places", quiet=as_json):
        known = api.ask_places(words)
    kinds = api.place_kinds()
    if as_json:
        document = [_place_document(place) for place in known]
        print_document({"kinds": [{"kind": kind, "form": form} for kind, form in kinds], "places": document})
    else:
        _render_places([] if words else kinds, known, Console())
    if words and not all(place.can_start for place in known):
        raise typer.Exit(PlaceFailed.exit_code)


def logs(
    run: RunWord = "latest",
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Go on until the run has ended.")] = False,
    as_json: AsJson = False,
) -> None:
    """Print what happened in a run, from its first event on; of a run elsewhere what is new is brought first."""
    directory = api.find_launched_or_run(run)
    if directory.read_launch() is None:
        if follow:
            raise BadRun(f"{directory.name} is executed here.", remedy="It shows itself where it was started.")
        with api.choose_display(as_json=as_json, stdout=sys.stdout, console=_lines_on(sys.stdout)) as display:
            for event in directory.read_events():
                display(event)
        return
    followed = follow_run(directory, as_json=as_json, is_watching=follow, stream=sys.stdout)
    if follow:
        raise typer.Exit(followed.exit_code)


def attach(run: RunWord = "latest", as_json: AsJson = False) -> None:
    """Show a run elsewhere as one here, until it has ended and its directory is here; Ctrl-C: detach, or stop it."""
    raise typer.Exit(follow_run(api.find_launched(run), as_json=as_json).exit_code)


def stop(run: RunWord = "latest", as_json: AsJson = False) -> None:
    """Ask a run elsewhere to save and leave, wait until it has, and fetch its directory."""
    directory = api.find_launched(run)
    followed = follow_run(directory, as_json=as_json, begin="stop")
    if followed.is_detached or followed.state.phase in ("failed", "lost"):
        raise typer.Exit(followed.exit_code)
    if not followed.is_home:
        raise typer.Exit(PlaceFailed.exit_code)


def fetch(run: RunWord = "latest", as_json: AsJson = False) -> None:
    """Fetch the directory of a run elsewhere as it is now; the run goes on."""
    directory = api.find_launched(run)
    with waiting(f"fetching {directory.name}", quiet=as_json):
        api.fetch_run(directory)
    is_run = directory.is_run
    record = directory.read_headway() if is_run else None
    if as_json:
        print_document({"path": str(directory.path), "run": to_json(record)})
    else:
        how_far = f"{record.status}, {record.samples:,} samples" if record is not None else "no checkpoint yet"
        say(f"{directory.path}: {how_far}")


def follow_run(
    directory: RunDirectory,
    *,
    as_json: bool,
    is_watching: bool = True,
    begin: Literal["follow", "stop"] = "follow",
    stream: TextIO | None = None,
) -> Followed:
    """Follow a run elsewhere on the display of a run here, and say how it ended.

    Args:
        directory: of the run here.
        as_json: one event a line on standard output, and how it ended on the last.
        is_watching: False: show what is there now and return.
        begin: `stop`: ask it to save and leave first, and show only what is new.
        stream: for lines of text in place of a live display on standard error.
    """
    console = Console(stderr=True) if stream is None else _lines_on(stream)
    with output(for_json=as_json) as stdout:
        plain = begin == "stop" and not as_json
        screen = _Screen(as_json=as_json, stdout=stdout, console=_lines_on(sys.stderr) if plain else console)
        try:
            follower = api.Follower(
                directory=directory,
                launcher=api.launcher_of_run(directory),
                sink=screen,
                ask=screen.ask,
                shows_past=begin == "follow",
                holds_stops=not as_json,
                is_watching=is_watching,
            )
            if begin == "stop" and follower.launch.is_going_on:
                follower.stop("asked to stop: the run saves and leaves")
            followed = follower.run()
        finally:
            screen.close()
        if as_json and is_watching:
            print(json.dumps(_end_document(followed)), file=stdout, flush=True)
        elif is_watching:
            _say_how_it_ended(followed, Console(stderr=True, highlight=False))
    return followed


class _Screen:
    """The display that a run is followed on; Ctrl-C takes it away to ask, and lines follow."""

    def __init__(self, *, as_json: bool, stdout: TextIO, console: Console) -> None:
        self._as_json = as_json
        self._display = api.choose_display(as_json=as_json, stdout=stdout, console=console)

    def __call__(self, event: Event) -> None:
        self._display(event)

    def close(self) -> None:
        self._display.close()

    def ask(self) -> Literal["detach", "stop"]:
        """What to do with the run after Ctrl-C: without a terminal it goes on."""
        if self._as_json or not sys.stdin.isatty() or not sys.stderr.isatty():
            return "detach"
        self.close()
        self._display = api.choose_display(console=_lines_on(sys.stderr))
        print(
            "\nThe run goes on there. Detach, or stop it (it saves first)? [D/s] ", end="", file=sys.stderr, flush=True
        )
        try:
            answer = sys.stdin.readline()
        except KeyboardInterrupt:
            return "detach"
        return "stop" if answer.strip().lower().startswith("s") else "detach"


def _lines_on(stream: TextIO) -> Console:
    """A console for lines that stay, also in a terminal."""
    return Console(file=stream, force_terminal=False)


def _say_how_it_ended(followed: Followed, console: Console) -> None:
    directory, state = followed.directory, followed.state
    launch = directory.read_launch()
    lines: list[tuple[str, str]] = []
    if followed.is_detached:
        lines.append((f"detached: {directory.name} goes on", f"stoker attach {directory.name}"))
    elif state.phase in ("failed", "lost"):
        evidence = f": {state.evidence}" if state.evidence else ""
        output_there = directory.launching / "output-0.log"
        where = f" Its output: {output_there}." if output_there.exists() else ""
        lines.append((f"{state.phase}: {state.why}{evidence}.{where}", "the same `stoker train` command continues it"))
    if launch is not None and (money := api.spent_words(launch, launch.spent)) and not followed.is_detached:
        lines.append((f"cost: {money}", ""))
    if followed.is_home:
        lines.append((f"here: {directory.path}", ""))
    elif followed.problem:
        lines.append((f"not fetched: {followed.problem}", f"stoker fetch {directory.name}"))
    for text, hint in lines:
        console.print(Text.assemble(printable(text), (f"  {hint}" if hint else "", "dim")), soft_wrap=True)


def _end_document(followed: Followed) -> dict[str, JSON]:
    launch = followed.directory.read_launch()
    return {
        "event": "detached" if followed.is_detached else "ended",
        "state": to_json(followed.state),
        "is_home": followed.is_home,
        "problem": followed.problem,
        "path": str(followed.directory.path),
        "spent": None if launch is None else launch.spent,
    }


def _render_places(kinds: list[tuple[str, str]], known: list[KnownPlace], console: Console) -> None:
    """Print the kinds of places, where there are any, and the places that were asked."""
    table = column_table("kind", "form of --on", folds={"form of --on"})
    for kind, form in kinds:
        table.add_row(Text(kind, "bold"), Text(form))
    if kinds:
        print_table(table, console)
        console.print()
    if not known:
        console.print(Text("No place was used yet; `stoker places PLACE` asks one.", "dim"))
        return
    titles = ("", "place", "runs", "queue", "start-up", "measured / forecast", "says")
    table = column_table(*titles, folds=titles)
    for place in known:
        learned = place.lessons
        mark, style = ("●", "green") if place.can_start else ("◐", "yellow") if place.is_reachable else ("○", "red")
        error = "" if learned.mean_error is None else f"{learned.ratio:.2f}× of {learned.num_ratios}"
        table.add_row(
            Text(mark, style),
            Text(place.word, "bold"),
            str(learned.num_runs),
            "none" if learned.queue_s is not None and learned.queue_s < 1 else _time(learned.queue_s),
            _time(learned.startup_s),
            error,
            Text(printable(place.in_words())),
        )
    print_table(table, console)
    console.print(Text("\n● can start a run   ◐ cannot: see what it says   ○ does not answer", "dim"))


def _time(duration_s: float | None) -> str:
    return "–" if duration_s is None else format_seconds(duration_s)


def _place_document(place: KnownPlace) -> dict[str, Any]:
    return {
        "place": place.word,
        "is_reachable": place.is_reachable,
        "can_start": place.can_start,
        "facts": place.facts,
        "missing": list(place.missing),
        "problem": place.problem,
        "lessons": to_json(place.lessons),
    }


def render_launched(directories: list[RunDirectory], console: Console) -> None:
    """Print runs that are executed elsewhere, as last seen: phase, place, how far, time to go, money."""
    folds = ("place", "samples", "to go", "cost")
    table = column_table("run", "phase", *folds, folds=folds, title="elsewhere, as last seen")
    for document in map(launched_document, directories):
        phase, share, to_go, spent = (document[name] for name in ("phase", "share", "eta_s", "spent"))
        style = {"failed": "red", "lost": "red", "running": "green"}.get(str(phase), "yellow")
        table.add_row(
            Text(str(document["run"]), "bold"),
            Text(str(phase), style),
            str(document["place"]),
            "" if share is None else f"{100 * share:.0f} %",
            _time(to_go),
            "" if spent is None else format_money(spent),
        )
    print_table(table, console)
    console.print(Text("`stoker attach RUN` asks now, and shows the run.\n", "dim"))


def launched_document(directory: RunDirectory) -> dict[str, Any]:
    """A run elsewhere as last seen, for `--json`; times in seconds, `spent` in US dollars, null for unknown."""
    launch = directory.read_launch()
    if launch is None:
        raise ValueError(f"{directory.path} is not executed elsewhere")
    try:
        events = directory.read_events()
    except StokerError:
        events = ()
    newest = next((event.fields for event in reversed(events) if event.kind == "progress"), {})
    samples, total, eta_s = newest.get("samples"), newest.get("total_samples"), newest.get("eta_s")
    share = samples / total if isinstance(samples, int) and isinstance(total, int) and total > 0 else None
    spent = api.spent_of(launch, events) if launch.price_per_h else None
    return {
        "run": directory.name,
        "path": str(directory.path),
        "place": launch.place,
        "phase": launch.state.phase,
        "why": launch.state.why,
        "seen_at": launch.state.at,
        "submitted_at": launch.submitted_at,
        "samples": samples,
        "share": share,
        "eta_s": eta_s if isinstance(eta_s, int | float) and launch.is_going_on else None,
        "spent": spent,
        "max_cost": launch.max_cost,
    }
