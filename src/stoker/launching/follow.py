"""The way home of a run elsewhere: its events as they come, its state, and at the end its directory.

What: `EventStream` brings `events.jsonl` here byte for byte, by offset. `Follower` shows it, asks for the state,
watches silence and money, and fetches the run's directory once the run has ended; from then on it is a run as any here.
Costs: one request a second while events come, fewer where a request takes long; one every five seconds for the state.
Never acts on ignorance: a place that does not answer is `unknown`; the follower then waits longer between questions,
and nothing is ended, restarted or taken for lost. It ends a run only where the user or `--max-cost` says so.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from stoker import training
from stoker.errors import BadRun, PlaceFailed, PlaceUnreachable, StokerError
from stoker.launching.launcher import Launcher, seen_now, utc_now
from stoker.launching.meter import HOLDS_DEVICES, Meter
from stoker.launching.place_history import remember_run
from stoker.records import ENDED, Event, Launch, LaunchState, from_json
from stoker.records.plan import Forecast
from stoker.records.progress import read_event
from stoker.reporting.event_text import describe_event
from stoker.store import RunDirectory, RunLock, disk_errors, write_atomic
from stoker.store.files import append_at, disk, read_lines, whole_bytes
from stoker.store.run_files import LAUNCH
from stoker.units import format_bytes, format_seconds

POLL_S, STATE_EVERY_S = 1.0, 5.0
"""Time between requests for events, and for the state [s]."""

QUESTION_SHARE, LONGEST_POLL_S = 0.05, 5.0
"""A request may take this share of the time between requests [0 to 1], so the pause grows with it, up to so long [s]:
a request costs the place a process, and by SSH a login shell, which a run on few cores feels."""

MORE_BYTES = 64 * 1024
"""An answer of so many bytes of the log is followed by another request at once [bytes]."""

LONGEST_PAUSE_S = 30.0
"""Time between requests at most while a place does not answer [s]: it doubles from `POLL_S` on."""

MOST_TRIES = 10
"""Requests for the run's directory of a run that ended, before it is left to `stoker fetch`."""

MOST_LINE_BYTES = 64 * 2**20
"""The longest line of a log that is brought here [bytes]."""

STALLED_UPDATES, LEAST_SILENCE_S = 3, 60.0
"""A run is said to be stalled after the forecast time of so many updates without an event, and at least so long [s]."""

_SAVED = ("checkpointed", "resumed", "stopped", "finished")
"""Kinds of events whose position can be continued from."""

Sink = Callable[[Event], None]
Answer = Literal["detach", "stop"]


class EventStream:
    """The log of a run elsewhere, brought into the run's directory here.

    The file here is the state: its size is the offset to ask for, so a client that was killed goes on where it was.
    Only whole lines are kept. The place drops a last line that was cut off before it writes the next one, so bytes
    behind the last line break may still change.
    """

    def __init__(self, path: Path, read: Callable[[int], bytes]) -> None:
        self._path, self._read = path, read
        self._shown = 0

    def pull(self) -> int:
        """Ask once; the number of bytes that were added here [bytes].

        Raises:
            BadRun: the log cannot be written here.
            PlaceFailed: the place refuses, or (PlaceUnreachable) does not answer.
        """
        offset = self._path.stat().st_size if self._path.exists() else 0
        # With the line break before it, which says that the log there is still the one that is here.
        data = self._read(max(0, offset - 1))
        if offset and data[:1] not in (b"", b"\n"):
            set_log_aside(self._path)
            self._shown = 0
            return self.pull()
        data = data[1:] if offset else data
        while data and b"\n" not in data and (more := self._read(offset + len(data))):  # a line longer than an answer
            data += more
            if len(data) > MOST_LINE_BYTES:
                raise PlaceFailed(
                    f"a line of the run's log there has more than {format_bytes(MOST_LINE_BYTES)}, {offset:,} bytes "
                    "from its beginning",
                    remedy="Log less at once (stoker.log), or read the log there; the run is not touched.",
                )
        whole = data[: data.rfind(b"\n") + 1]
        if whole and not append_at(self._path, offset, whole, what="the run's events", error=BadRun):
            return 0  # another client was faster
        return len(whole)

    def new_events(self) -> list[Event]:
        """Events of the file here that were not returned before; a line that cannot be read is a `warned` event."""
        events: list[Event] = []
        for line in read_lines(self._path, self._shown):
            try:
                events.append(read_event(line))
            except ValueError as problem:
                message = f"a line of the log, {self._shown} bytes from its beginning, cannot be read: {problem}"
                events.append(Event(kind="warned", at=events[-1].at if events else 0.0, fields={"message": message}))
            self._shown += len(line) + 1
        return events


def set_log_aside(path: Path) -> None:
    """Keep the log here under another name: the one there was replaced, as on a host that lost its disk."""
    number = next(n for n in range(1, 10_000) if not path.with_name(f"events-{n}.jsonl").exists())
    with disk_errors(path, "the run's events", error=BadRun):
        disk().rename(path, path.with_name(f"events-{number}.jsonl"))


class _StartedElsewhere(Exception):
    """Another command has started the run since this one began to follow it."""


@dataclass
class Pulse:
    """Signs of life of a run: how long it has been silent, against what its forecast lets expect.

    Silence counts only while the place answers: events that a cut line holds back are no silence of the run.

    Attributes:
        silent_s: time without an event [s].
        update_s: forecast, or measured, time of an update, evaluation or checkpoint, whichever is longest [s].
    """

    silent_s: float = 0.0
    update_s: float = 0.0
    is_training: bool = False
    is_reported: bool = False

    @property
    def patience_s(self) -> float:
        """Silence from which on the run counts as stalled [s]."""
        return max(LEAST_SILENCE_S, STALLED_UPDATES * self.update_s)

    def on_event(self, event: Event) -> None:
        """Take in an event."""
        self.silent_s, self.is_reported = 0.0, False
        self.is_training = event.kind not in ("planned", "stopped", "finished")
        fields = event.fields
        if isinstance(fields.get("forecast"), dict):
            forecast = from_json(fields["forecast"], Forecast)
            self.update_s = max(forecast.step_s.high, forecast.evaluate_s.high, forecast.checkpoint_s.high)
        for name in ("took_s", "write_s"):
            if event.kind in ("evaluated", "checkpointed") and isinstance(value := fields.get(name), int | float):
                self.update_s = max(self.update_s, float(value))

    def on_wait(self, duration_s: float) -> str | None:
        """Let time pass; a sentence once the run has been silent for too long."""
        self.silent_s += duration_s
        if not self.is_training or self.is_reported or self.silent_s < self.patience_s:
            return None
        self.is_reported = True
        expected = format_seconds(self.update_s) if self.update_s else "an unknown time"
        return (
            f"stalled? No event for {format_seconds(self.silent_s)}, while its slowest step takes {expected}. Nothing "
            "is done about it here; its own watchdog there writes down what each thread does"
        )


@dataclass(frozen=True, kw_only=True)
class Followed:
    """How following a run ended.

    Attributes:
        directory: of the run here.
        state: the newest state that is known.
        is_detached: the run goes on there.
        is_home: the run's directory was fetched after its end.
        problem: why it was not, if it was not.
    """

    directory: RunDirectory
    state: LaunchState
    is_detached: bool = False
    is_home: bool = False
    problem: str = ""

    @property
    def exit_code(self) -> int:
        """Exit code of a command that followed the run: 0 finished, 130 stopped or detached, else that of the run."""
        if self.is_detached or self.state.phase == "stopped":
            return 130
        if self.state.phase == "finished":
            return 0 if self.is_home else PlaceFailed.exit_code
        return self.state.exit_code if self.state.exit_code in (2, 3, 4) else PlaceFailed.exit_code


@dataclass
class Follower:
    """Follows the run in `directory` until it has ended, or the user turns away.

    Attributes:
        directory: of the run here, with its `launch.json`.
        launcher: of its kind of place.
        sink: receives the run's events, and changes of its state as `noted` and `warned` events, which are not stored.
        shows_past: whether events that are here already are given to `sink` too.
        ask: called on Ctrl-C; a second Ctrl-C detaches.
        holds_stops: for people: a `stopped` event that others follow, as after a preemption, is given to `sink` as
            `noted`, since a live display ends with the first `stopped`; and the report is the one here.
        clock, sleep: time [s], and waiting.
        is_watching: False: read the log once, and return.
    """

    directory: RunDirectory
    launcher: Launcher
    sink: Sink
    shows_past: bool = True
    ask: Callable[[], Answer] = lambda: "detach"
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    holds_stops: bool = True
    is_watching: bool = True

    def __post_init__(self) -> None:
        launch = self.directory.read_launch()
        if launch is None:
            raise BadRun(
                f"{self.directory.name} is not executed elsewhere.", remedy="`stoker runs` lists what is here."
            )
        self.launch: Launch = launch
        self.pulse, self.meter = Pulse(), Meter.of(launch)
        self._stream = EventStream(
            self.directory.events_path, lambda offset: self.launcher.events(self.launch.handle, offset)
        )
        self._state = LaunchState(phase="unknown", why="not asked yet")
        self._num_past = 0 if self.shows_past else len(self.directory.read_events())
        self._held: Event | None = None
        self._poll_s = self._pause_s = POLL_S
        self._shown_phase = ""
        self._is_stopping, self._is_asked_to_stop = False, False

    def run(self) -> Followed:
        """Follow until the end.

        Raises:
            BadRun: what comes cannot be written here.
            PlaceFailed: the place refuses to answer, as after a login was taken away; the run there is not touched.
        """
        while True:
            try:
                return self._follow()
            except KeyboardInterrupt:
                if self._is_stopping or self._state.phase in ENDED or self.ask() == "detach":
                    return self._detached()
                self.stop("asked to stop: the run saves and leaves")
            except _StartedElsewhere:
                self._tell("warned", f"{self.directory.name} was started again by another command; follow that one")
                return Followed(directory=self.directory, state=self._state, is_detached=True)

    def stop(self, why: str) -> None:
        """Ask the run to save and leave; following goes on until it has, and asks again if the place did not answer."""
        is_first, self._is_stopping = not self._is_stopping, True
        if is_first:
            self._tell("noted", why)
        try:
            self.launcher.stop(self.launch.handle)
            self._is_asked_to_stop = True
        except PlaceUnreachable as problem:
            if is_first:
                self._tell("warned", f"{problem.message}: the run was not asked to stop yet, and is asked again")

    def _follow(self) -> Followed:
        asked_at = float("-inf")
        while True:
            began = self.clock()
            is_answered = self._pull()
            if is_answered and self.clock() - asked_at >= STATE_EVERY_S:
                is_answered = self._ask_state()
                asked_at = self.clock()
            if self._state.phase in ENDED and is_answered:
                self._pull()
                return self._ended()
            if not self.is_watching:
                return self._detached()
            self._stop_if_wanted()
            self._pause_s = self._poll_s if is_answered else min(LONGEST_PAUSE_S, 2 * self._pause_s)
            self.sleep(self._pause_s)
            waited_s = self.clock() - began
            is_at_work = is_answered and self._state.phase in HOLDS_DEVICES
            if is_at_work and (sentence := self.pulse.on_wait(waited_s)) is not None:
                self._tell("warned", sentence)
            self.meter.on_wait(waited_s)

    def _pull(self) -> bool:
        """Bring and show what is new; False if the place does not answer.

        A short answer was all that there was: each question costs the place a process, which a run on few cores feels.
        Where a request takes as long as the run takes to say something, more is always there: the rest waits for the
        next call, so that the state is asked for and the money watched. An ended run's log is read to its end; where
        nothing is watched, that of another run as far as it is when a request catches up with it.
        """
        began = self.clock()
        try:
            while num_bytes := self._ask_events():
                self._show_new()
                is_late = self.is_watching and self.clock() - began >= POLL_S
                if self._state.phase not in ENDED and (num_bytes < MORE_BYTES or is_late):
                    break
        except PlaceUnreachable as problem:
            self._show_new()
            self._unknown(problem.message)
            return False
        self._show_new()
        return True

    def _ask_events(self) -> int:
        """Bring what is new, and see how long to wait before the next request; how much came [bytes]."""
        began = self.clock()
        num_bytes = self._stream.pull()
        rare_s = min(LONGEST_POLL_S, (self.clock() - began) / QUESTION_SHARE)
        self._poll_s = POLL_S if num_bytes >= MORE_BYTES else max(POLL_S, rare_s)  # a long one is a transfer
        return num_bytes

    def _show_new(self) -> None:
        for event in self._stream.new_events():
            self.pulse.on_event(event)
            self.meter.on_event(event)
            self._num_past -= 1
            if self._num_past >= 0:
                continue
            self._release(is_last=False)
            if event.kind == "stopped" and self.holds_stops:
                self._held = event
                continue
            if event.kind == "finished" and self.holds_stops:  # people find the report here
                report = str(self.directory.report_path)
                event = replace(event, fields={**event.fields, "report": report})  # noqa: PLW2901 - the same event
            self.sink(event)

    def _release(self, *, is_last: bool) -> None:
        """Show the `stopped` event that was held back: as what it is if nothing followed it."""
        event, self._held = self._held, None
        if event is not None:
            message = describe_event(event)
            self.sink(event if is_last else Event(kind="noted", at=event.at, fields={"message": message}))

    def _ask_state(self) -> bool:
        """Ask for the state and keep it; False if the place does not answer."""
        try:
            state = self.launcher.state(self.launch.handle)
        except PlaceUnreachable as problem:
            self._unknown(problem.message)
            return False
        if state.phase == "unknown":
            self._unknown(state.evidence or state.why)
            return False
        self._keep(state)
        return True

    def _keep(self, state: LaunchState) -> None:
        """Show a state that differs from the last one shown, and keep it in the run's record if it is another phase."""
        state = state if state.at else replace(state, at=utc_now())
        before, self._state = self.launch.state, state
        if (state.phase, state.restarts) != (before.phase, before.restarts) or not self.launch.states:
            self._record(replace(self.launch, states=(*self.launch.states, state)))
        self.meter.on_state(state)
        words = describe_state(state, self.launch.place)
        if words != self._shown_phase:
            self._shown_phase = words
            self._tell("warned" if state.phase in ("failed", "lost") else "noted", words, state)

    def _record(self, launch: Launch) -> None:
        """Keep the run's record, unless another command has started the run again: that one's record counts."""
        there = self.directory.read_launch()
        if there is None or there.submitted_at != self.launch.submitted_at:
            raise _StartedElsewhere
        self.launch = launch
        self.directory.write(LAUNCH, launch)

    def _unknown(self, evidence: str) -> None:
        """Say once that the place does not answer; the last known phase stays in the record."""
        if self._shown_phase != "unknown":
            self._shown_phase = "unknown"
            state = seen_now("unknown", "the place does not answer", evidence)
            known = f", last seen {self._state.phase}" if self._state.phase != "unknown" else ""
            self._tell("warned", f"{self.launch.place} does not answer{known} ({evidence}): asking again", state)

    def _stop_if_wanted(self) -> None:
        """Ask for the stop that did not arrive, or for the one that money wants."""
        why = "" if self._is_stopping else self.meter.over_limit()
        if why is not None and not self._is_asked_to_stop:
            self.stop(why)

    def _ended(self) -> Followed:
        self._release(is_last=True)
        self._record(replace(self.launch, spent=self.meter.spent))
        for number in range(MOST_TRIES):
            try:
                bring_home(self.directory, self.launcher, self.launch)
            except (PlaceFailed, BadRun) as error:  # BadRun: a full disk here, or another client that fetches it
                problem = error.message
                if not isinstance(error, PlaceUnreachable):
                    break
                self.sleep(min(LONGEST_PAUSE_S, POLL_S * 2**number))
            else:
                self._learn_end()
                remember_run(self.directory, self.launch)
                write_report(self.directory)
                return Followed(directory=self.directory, state=self._state, is_home=True)
        return Followed(directory=self.directory, state=self._state, problem=problem)

    def _learn_end(self) -> None:
        """Of a run that is home: a place that forgets what has ended, as Kubernetes does, calls it stopped."""
        if self._state.phase != "stopped" or not self.directory.is_run:
            return
        if self.directory.read_run().status == "finished":
            self._keep(seen_now("finished", "trained to its end", self._state.evidence, exit_code=0))

    def _detached(self) -> Followed:
        self._release(is_last=True)
        if self._state.phase in ENDED:
            return Followed(directory=self.directory, state=self._state, problem="interrupted")
        return Followed(directory=self.directory, state=self._state, is_detached=True)

    def _tell(self, kind: Literal["noted", "warned"], message: str, state: LaunchState | None = None) -> None:
        fields = {"message": message}
        if state is not None:
            fields |= {"phase": state.phase, "place": self.launch.place, "why": state.why, "evidence": state.evidence}
        self.sink(Event(kind=kind, at=time.time(), fields=dict(fields)))


def describe_state(state: LaunchState, place: str) -> str:
    """A state in one line: `queued at slurm:gpu: waiting for resources, starts in about 5 min`."""
    text = f"{state.phase} at {place}: {state.why}"
    if state.evidence and state.evidence != state.why:
        text += f" ({state.evidence})"
    if state.starts_in_s is not None and state.phase in ("queued", "requeued"):
        text += f", starts in about {format_seconds(_rounded(state.starts_in_s))}"
    if state.restarts:
        text += f", started again {state.restarts} {'time' if state.restarts == 1 else 'times'}"
    return text


def write_report(directory: RunDirectory) -> None:
    """Rewrite the report of a fetched run with what only this machine knows: waits, states, cost."""
    if directory.is_run and directory.report_path.exists():
        with suppress(StokerError):  # the one from there stays
            training.run_handle.report(directory.path)  # loads torch, which following itself does not


def bring_home(directory: RunDirectory, launcher: Launcher, launch: Launch) -> None:
    """Fetch the run's directory into `directory`; a transfer that is cut leaves whole files only.

    What was made here stays as it is, whatever the place sends: the launch's record, and the copy of the job, which is
    code that `stoker.load` runs. A log here that the one there does not continue is kept under another name.

    Raises:
        BadRun: the directory here is in use by another process, cannot be written, or is further than the one there.
        PlaceFailed: the place refuses, or (PlaceUnreachable) does not answer.
    """
    with RunLock(directory.path), disk_errors(directory.path, "the run's directory", error=BadRun):
        _require_newer(directory, launcher, launch)
        own = _own_files(directory.path)
        try:
            launcher.fetch(launch.handle, directory.path)
        finally:
            for path in _own_files(directory.path).keys() - own.keys():
                disk().remove_file(path)
            for path, content in own.items():
                if not path.is_file() or path.read_bytes() != content:
                    write_atomic(path, content)


def _require_newer(directory: RunDirectory, launcher: Launcher, launch: Launch) -> None:
    """Refuse to replace a run that went on here by the older one there; set a log aside that has another one there."""
    path = directory.events_path
    size = _whole_bytes(path)
    is_same = not size or launcher.events(launch.handle, size - 1)[:1] == b"\n"
    if is_same and not path.with_name("events-1.jsonl").exists():  # nothing but what came from there is here
        return
    num_bytes, samples_there = _saved_there(launcher, launch)
    samples = 0
    with suppress(StokerError):  # a record that cannot be read is no loss
        samples = directory.read_headway().samples if directory.is_run else 0
    if launch.state.phase != "finished" and samples > samples_there:
        raise BadRun(
            f"{directory.name} is further here ({samples:,} samples) than at {launch.place} ({samples_there:,}): "
            "nothing was replaced",
            remedy="Go on with the run here; or move its directory away, and fetch that of the place.",
        )
    if num_bytes and not is_same:
        set_log_aside(path)


def _whole_bytes(path: Path) -> int:
    """Size of a log up to the end of its last whole line [bytes]; 0 if it is not there."""
    if not path.exists():
        return 0
    with path.open("rb") as file:
        return whole_bytes(file.fileno())


def _saved_there(launcher: Launcher, launch: Launch) -> tuple[int, int]:
    """Size of the log there [bytes], and the furthest position that it says was saved [samples]."""
    offset, furthest, rest = 0, 0, b""
    while data := launcher.events(launch.handle, offset):
        offset += len(data)
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            with suppress(ValueError):  # a line that cannot be read says nothing
                event = read_event(line)
                samples = event.fields.get("samples")
                if event.kind in _SAVED and isinstance(samples, int):
                    furthest = max(furthest, samples)
    return offset, furthest


def _own_files(directory: Path) -> dict[Path, bytes]:
    """Files that are made here and not at the place, with their content."""
    paths = [directory / name for name in ("launch.json", "started.json", "changes.diff")]
    paths += sorted((directory / "job").rglob("*"))
    return {path: path.read_bytes() for path in paths if path.is_file()}


def _rounded(duration_s: float) -> float:
    """An estimate without figures that it does not have [s]."""
    return round(duration_s / 10) * 10 if duration_s < 600 else round(duration_s / 60) * 60
