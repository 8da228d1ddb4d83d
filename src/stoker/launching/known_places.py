"""Places that can be asked, and runs that are executed elsewhere, as this machine knows them."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from stoker.errors import BadRun, PlaceUnreachable, StokerError, nearest
from stoker.launching import kinds, launcher_of, parse_target
from stoker.launching.follow import bring_home
from stoker.launching.launcher import Launcher
from stoker.launching.place_history import PlaceLessons, lessons_of, place_history, place_of
from stoker.records import Launch
from stoker.store import LATEST, RunDirectory, find_named, find_run, runs_root
from stoker.store.disk_errors import read_errors


@dataclass(frozen=True, kw_only=True)
class KnownPlace:
    """A place that was asked.

    Attributes:
        word: the word of `--on`.
        is_reachable: it answered.
        facts, missing: see `Probe`.
        problem: why it cannot be used; "" if it can be asked.
        lessons: what earlier runs there showed.
    """

    word: str
    is_reachable: bool
    facts: dict[str, str] = field(default_factory=dict)
    missing: tuple[str, ...] = ()
    problem: str = ""
    lessons: PlaceLessons = field(default_factory=PlaceLessons)

    @property
    def can_start(self) -> bool:
        """Whether a run can be started there now."""
        return self.is_reachable and not self.missing and not self.problem

    def in_words(self) -> str:
        """The problem of the place, or else its devices, in one line."""
        if self.problem or self.missing:
            return self.problem or "; ".join(self.missing)
        return " · ".join(f"{name} {text}" for name, text in self.facts.items())


def place_kinds() -> list[tuple[str, str]]:
    """Kinds of places, and the form of their words; why a kind cannot be used, where a library is missing."""
    found = []
    for kind in sorted(kinds()):
        try:
            found.append((kind, launcher_of(kind).syntax))
        except ImportError as problem:
            found.append((kind, f"cannot be used: {problem}"))
    return found


def ask_places(words: Sequence[str] | None = None) -> list[KnownPlace]:
    """Probe places, all at once; without words those of earlier runs and of runs here.

    Raises:
        NoDevice: a word cannot be read.
    """
    chosen = list(dict.fromkeys(words or _used_words()))
    if words:
        for word in chosen:
            parse_target(word)
    if not chosen:
        return []
    with ThreadPoolExecutor(max_workers=min(8, len(chosen))) as pool:
        return list(pool.map(_ask, chosen))


def _ask(word: str) -> KnownPlace:
    lessons = lessons_of(place_of(word))
    try:
        target = parse_target(word)
        probe = launcher_of(target.kind).probe(target, {})
    except PlaceUnreachable as problem:
        return KnownPlace(word=word, is_reachable=False, problem=problem.message, lessons=lessons)
    except (StokerError, ImportError) as problem:
        return KnownPlace(word=word, is_reachable=True, problem=str(problem).split("\n", 1)[0], lessons=lessons)
    if probe.place:
        lessons = lessons_of(probe.place)
    return KnownPlace(word=word, is_reachable=True, facts=probe.facts, missing=probe.missing, lessons=lessons)


def _used_words() -> list[str]:
    """Words of `--on` that were used, the newest first, one for each place."""
    words = [launch.place for _, launch in launched_runs(runs_root())]
    words += [run.word for run in reversed(place_history().read())]
    by_place: dict[str, str] = {}
    for word in words:
        by_place.setdefault(place_of(word), word)
    return list(by_place.values())


def launched_runs(root: Path) -> list[tuple[RunDirectory, Launch]]:
    """Runs in `root` that are, or were, executed elsewhere, the newest submission first; without unreadable ones."""
    runs = []
    with read_errors(root):
        paths = [path for path in root.iterdir() if path.is_dir()] if root.exists() else []
    for directory in map(RunDirectory, paths):
        try:
            launch = directory.read_launch()
        except BadRun:
            continue
        if launch is not None:
            runs.append((directory, launch))
    return sorted(runs, key=lambda pair: (pair[1].submitted_at, pair[0].name), reverse=True)


def runs_elsewhere(root: Path) -> list[RunDirectory]:
    """Runs in `root` whose directory has not come home: they go on elsewhere, or could not be fetched."""
    return [directory for directory, launch in launched_runs(root) if launch.is_going_on or not directory.is_run]


def find_launched(word: str) -> RunDirectory:
    """The run elsewhere that a user means: its name, the start of just one name, a directory, or `latest`.

    Raises:
        BadRun: there is none; the near ones are named.
    """
    by_name = {directory.name: directory for directory, _ in launched_runs(runs_root())}
    if word == LATEST and by_name:
        return next(iter(by_name.values()))
    at_path = RunDirectory(Path(word))
    if (directory := find_named(word, by_name, at_path if at_path.read_launch() is not None else None)) is not None:
        return directory
    if word and any(RunDirectory(path).is_run for path in (runs_root() / word, Path(word))):
        raise BadRun(f"{word} is executed here.", remedy="`stoker train` with the same words continues it.")
    raise BadRun(f"There is no run {word!r} elsewhere.", remedy=nearest(word, by_name))


def find_launched_or_run(word: str) -> RunDirectory:
    """The run a user means, elsewhere or here; of `latest` the newest of all.

    Raises:
        BadRun: there is none.
    """
    if word != LATEST:
        named = RunDirectory(runs_root() / word)
        if named.name == word and named.is_run:  # a whole name, before the start of another
            return named
        try:
            return find_launched(word)
        except BadRun:
            return find_run(runs_root(), word)
    elsewhere = launched_runs(runs_root())
    try:
        here = find_run(runs_root(), word)
    except BadRun:
        return find_launched(word)
    is_newer = bool(elsewhere) and elsewhere[0][1].submitted_at >= here.read_run().created_at
    return elsewhere[0][0] if is_newer else here


def launcher_of_run(directory: RunDirectory) -> Launcher:
    """The launcher of the place where a run is executed.

    Raises:
        BadRun: it is executed here.
    """
    launch = directory.read_launch()
    if launch is None:
        raise BadRun(f"{directory.name} is executed here.", remedy="`stoker runs` lists all runs.")
    return launcher_of(launch.kind)


def fetch_run(directory: RunDirectory) -> None:
    """Fetch the directory of a run elsewhere as it is now.

    Raises:
        BadRun: it is executed here, or its directory is in use or cannot be written.
        PlaceFailed: the place refuses, or (PlaceUnreachable) does not answer.
    """
    launcher, launch = launcher_of_run(directory), directory.read_launch()
    assert launch is not None  # launcher_of_run has read it
    bring_home(directory, launcher, launch)
