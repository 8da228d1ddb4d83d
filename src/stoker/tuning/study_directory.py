"""Studies on disk: `study.json`, `forecast.json`, `study.db`, `study.html`, and a run for each trial in `trials/`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from stoker import records, reporting, training
from stoker.errors import BadRun, RunFailed, first_line, nearest
from stoker.records.study import StudyForecast, StudyResult, StudySettings, StudyTrial
from stoker.store import RunLock, disk_errors, find_named, write_atomic
from stoker.store.disk_errors import read_errors
from stoker.store.files import is_aside, make_directories, read_record
from stoker.store.locks import HELD_FILE, LOCK_FILE

if TYPE_CHECKING:
    from stoker.training.run_handle import Run


FILE = "study.json"
_FORECAST, _PAGE = "forecast.json", "study.html"
_BEFORE = (LOCK_FILE, HELD_FILE, _FORECAST)
"""Files that may exist before a study does, as after a kill."""

_REMEDY = "Restore it from a copy."


class StudyDirectory:
    """A study's directory."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def name(self) -> str:
        """The study's name."""
        return self.path.name

    @property
    def is_study(self) -> bool:
        """Whether a study was begun here."""
        return (self.path / FILE).exists()

    @property
    def page_path(self) -> Path:
        """The study's page, if it was written."""
        return self.path / _PAGE

    def read_settings(self) -> StudySettings:
        """The settings of the study.

        Raises:
            BadRun: it is missing, damaged or of another version.
        """
        return read_record(self.path / FILE, StudySettings, remedy=_REMEDY)

    def read_forecast(self) -> StudyForecast | None:
        """The forecast of the study; None if it was not asked for; raises as `read_settings`."""
        path = self.path / _FORECAST
        return read_record(path, StudyForecast, remedy=_REMEDY) if path.exists() else None

    def begin(self, settings: StudySettings, forecast: StudyForecast | None) -> None:
        """Write down what the study is, the first time; its lock must be held.

        Raises:
            BadRun: something else is in the directory, or it cannot be written.
        """
        if self.is_study:
            return
        others = sorted(
            entry.name for entry in self.path.iterdir() if entry.name not in _BEFORE and not is_aside(entry)
        )
        if others:
            raise BadRun(
                f"{self.path} is no study: it holds {', '.join(others[:3])}.", remedy="Choose another --study NAME."
            )
        if forecast is not None:
            write_atomic(self.path / _FORECAST, records.dumps(forecast) + "\n", what="the forecast", error=BadRun)
        write_atomic(self.path / FILE, records.dumps(settings) + "\n", what="the study's settings", error=BadRun)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the study's directory for this process; another machine has a directory of its own.

        Raises:
            BadRun: another process holds it.
        """
        with disk_errors(self.path, "the study's directory", error=BadRun):
            make_directories(self.path)
        lock = RunLock(self.path)
        try:
            lock.acquire()
        except BadRun as error:
            raise BadRun(
                error.message.replace("The run ", "The study ", 1),
                remedy="It goes on there. To work on one study from several places at once, give each its own "
                "STOKER_RUNS and all the same --storage URL and --study NAME.",
            ) from error
        try:
            yield
        finally:
            lock.release()


class Study:
    """A study as people use it: its trials, the best of them, its page."""

    def __init__(self, directory: StudyDirectory, result: StudyResult) -> None:
        self.directory, self.result = directory, result

    @property
    def name(self) -> str:
        """Its name."""
        return self.directory.name

    @property
    def path(self) -> Path:
        """Its directory."""
        return self.directory.path

    @property
    def page_path(self) -> Path:
        """Its page, an HTML file."""
        return self.directory.page_path

    @property
    def forecast(self) -> StudyForecast | None:
        """The forecast of the study."""
        return self.result.forecast

    @property
    def trials(self) -> tuple[StudyTrial, ...]:
        """All trials, best first."""
        return self.result.ranked

    @property
    def best(self) -> StudyTrial:
        """The finished trial with the best value.

        Raises:
            BadRun: none is finished.
        """
        if self.result.best is None:
            raise BadRun(f"{self.name} has no finished trial yet", remedy="Continue it with the same command.")
        return self.result.best

    def run(self, number: int | None = None) -> Run:
        """The run of a trial, the best one's by default: metrics, weights, model, report.

        Args:
            number: of a trial; None: the best one.

        Raises:
            BadRun: there is none, or it is on another machine.
        """
        trial = self.best.number if number is None else number
        found = next((one for one in self.result.trials if one.number == trial), None)
        if found is None:
            raise BadRun(f"{self.name} has no trial {trial}: it has {len(self.result.trials)}")
        return training.run_handle.load(self.path / found.run)

    def __repr__(self) -> str:
        """Name, trials and the best."""
        best = self.result.best
        words = (
            "" if best is None else f", best {self.result.settings.objective} {best.value:.4g} (trial {best.number})"
        )
        return f"<Study {self.name}: {len(self.result.trials)} trials{words}>"


def find_study(root: Path, word: str) -> StudyDirectory:
    """The study a user means: the name of one in `root`, the start of just one, or a path.

    Raises:
        BadRun: there is none, or several fit.
    """
    with read_errors(root):
        entries = sorted(root.iterdir()) if root.is_dir() else []
    names = {entry.name: StudyDirectory(entry) for entry in entries if StudyDirectory(entry).is_study}
    at_path = StudyDirectory(Path(word))
    if (directory := find_named(word, names, at_path if at_path.is_study else None, "studies")) is not None:
        return directory
    raise BadRun(f"There is no study {word!r} in {root}. {nearest(word, names)}")


def write_page(directory: StudyDirectory, result: StudyResult) -> str | None:
    """Write the study's page; returns what went wrong, which costs no study, and None if nothing did."""
    try:
        write_atomic(
            directory.page_path, reporting.study_page.render_study(result), what="the study's page", error=RunFailed
        )
    except Exception as problem:  # noqa: BLE001 - a mistake in drawing a figure must not cost hours of training
        return f"the study's page could not be written: {first_line(problem)}"
    return None
