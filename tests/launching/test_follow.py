"""Following a run elsewhere: what comes home, what is said of it, and that ignorance does nothing."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from stoker.errors import BadRun, PlaceFailed, PlaceUnreachable
from stoker.launching.follow import LONGEST_PAUSE_S, MORE_BYTES, EventStream, Follower
from stoker.launching.known_places import fetch_run
from stoker.launching.place_history import lessons_of
from stoker.records import LaunchState, Run
from stoker.records.progress import read_event
from stoker.records.run import RunStatus
from stoker.reporting.launch_text import launch_waits
from stoker.store import RunDirectory, RunLock
from stoker.store.run_files import LAUNCH, RUN
from tests.launching.elsewhere import FINISHED, RUNNING, STOPPED, Elsewhere, fake_place

__all__ = ["fake_place"]

SILENT = PlaceUnreachable("fake cannot be reached: timed out")


@pytest.fixture
def run(place: Path, fake_place: Any) -> Elsewhere:
    """A run that trains elsewhere."""
    fake_place.answers = [RUNNING]
    return Elsewhere.make(place, fake_place)


def log_of(run: Elsewhere) -> bytes:
    """The log here."""
    return run.here.events_path.read_bytes()


def test_events_come_byte_for_byte_and_the_directory_at_the_end(run: Elsewhere) -> None:
    """The log here equals the log there, each event is shown once, and files of the run are here after its end."""
    run.log("started", 0, samples=0, total_samples=100)
    run.log("progress", 1, samples=50, total_samples=100)
    run.launcher.answers = [RUNNING, FINISHED]
    run.launcher.meanwhile = lambda: run.log("progress", 2, samples=60, total_samples=100)
    (run.there / "model.safetensors").write_bytes(b"weights")
    followed = run.follower().run()
    assert (followed.exit_code, followed.is_home) == (0, True)
    assert log_of(run) == (run.there / "events.jsonl").read_bytes()
    assert [event.fields["samples"] for event in run.shown if event.kind == "progress"] == [50, 60, 60]
    assert (run.here.path / "model.safetensors").read_bytes() == b"weights"
    launch = run.here.read_launch()
    assert launch is not None
    assert [state.phase for state in launch.states] == ["running", "finished"]


def test_a_short_answer_is_all_there_is(run: Elsewhere, monkeypatch: pytest.MonkeyPatch) -> None:
    """One request a second while events come; more than an answer holds is asked for at once."""
    asked: list[float] = []
    events = run.launcher.events

    def read(handle: Any, offset: int) -> bytes:
        asked.append(run.clock.now_s)
        return bytes(events(handle, offset)[:MORE_BYTES])

    monkeypatch.setattr(run.launcher, "events", read)
    run.log("progress", 1, samples=50)
    run.launcher.answers = [RUNNING, FINISHED]
    run.launcher.meanwhile = lambda: run.log("progress", 2, samples=60)
    run.follower().run()
    until_end = [at for at in asked if at < asked[-1]]
    assert len(until_end) == len(set(until_end))
    asked.clear()
    for number in range(3_000):
        run.log("progress", 3, samples=61 + number)
    run.follower(is_watching=True).run()
    assert log_of(run) == (run.there / "events.jsonl").read_bytes()


@pytest.mark.parametrize(("took_s", "pause_s"), [(0.0, 1.0), (0.02, 1.0), (0.15, 3.0), (9.0, 5.0)])
def test_a_request_takes_a_small_share_of_the_time(
    run: Elsewhere, monkeypatch: pytest.MonkeyPatch, took_s: float, pause_s: float
) -> None:
    """Where it takes long, as by a login shell of a host with few cores, the next one comes later, up to a bound."""
    began: list[float] = []
    events = run.launcher.events

    def read(handle: Any, offset: int) -> bytes:
        began.append(run.clock.now_s)
        run.clock.advance(took_s)
        return bytes(events(handle, offset))

    monkeypatch.setattr(run.launcher, "events", read)
    run.log("progress", 1, samples=50)
    run.launcher.answers = [RUNNING, RUNNING, FINISHED]
    run.follower().run()
    assert began[1] - began[0] == pytest.approx(took_s + pause_s)


def test_a_torn_line_is_asked_for_again(run: Elsewhere) -> None:
    """Half a line is not kept here, since the place drops it before it writes the next one."""
    run.log("progress", 1, samples=50)
    path = run.there / "events.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"record": "Eve')
    follower = run.follower(is_watching=False)
    follower.run()
    assert log_of(run) == whole
    path.write_bytes(whole)
    run.log("progress", 2, samples=60)
    follower.run()
    assert log_of(run) == path.read_bytes()
    assert [event.fields["samples"] for event in run.shown if event.kind == "progress"] == [50, 60]


def test_a_client_that_was_killed_goes_on_at_its_offset(run: Elsewhere) -> None:
    """The file here is the state: what is here already is not asked for again but for its last byte."""
    run.log("progress", 1, samples=50)
    run.follower(is_watching=False).run()
    offset = len(log_of(run))
    run.log("progress", 2, samples=60)
    asked: list[int] = []

    def read(at: int) -> bytes:
        asked.append(at)
        return (run.there / "events.jsonl").read_bytes()[at:]

    assert EventStream(run.here.events_path, read).pull() == len((run.there / "events.jsonl").read_bytes()) - offset
    assert asked == [offset - 1]
    assert log_of(run) == (run.there / "events.jsonl").read_bytes()


def test_two_clients_do_not_write_twice(run: Elsewhere) -> None:
    """A client whose answer comes after another one's adds nothing."""
    run.log("progress", 1, samples=50)
    content = (run.there / "events.jsonl").read_bytes()
    other = EventStream(run.here.events_path, lambda at: content[at:])

    def read_late(at: int) -> bytes:
        other.pull()
        return content[at:]

    assert EventStream(run.here.events_path, read_late).pull() == 0
    assert log_of(run) == content


def test_a_log_that_was_replaced_there_is_kept_here_under_another_name(run: Elsewhere) -> None:
    """As on a host that lost its disk: nothing here is overwritten, and the new log is read from its beginning."""
    run.log("progress", 1, samples=50)
    run.log("progress", 2, samples=60)
    run.follower(is_watching=False).run()
    before = log_of(run)
    (run.there / "events.jsonl").unlink()
    for number in range(9):
        run.log("progress", number, samples=number, message="x" * 40)
    run.follower(is_watching=False).run()
    assert (run.here.path / "events-1.jsonl").read_bytes() == before
    assert log_of(run) == (run.there / "events.jsonl").read_bytes()


def test_a_cut_line_is_waited_out_and_said_once(run: Elsewhere) -> None:
    """Pauses double up to a bound; the run is followed again afterwards, to the same bytes."""
    run.log("progress", 1, samples=50)
    run.launcher.cut_for = 8
    run.launcher.answers = [RUNNING, FINISHED]
    followed = run.follower().run()
    assert followed.exit_code == 0
    assert sum("does not answer" in message for message in run.messages()) == 1
    assert run.clock.now_s >= sum(min(LONGEST_PAUSE_S, 2.0**n) for n in range(1, 9))
    assert log_of(run) == (run.there / "events.jsonl").read_bytes()


@pytest.mark.parametrize("answer", [SILENT, LaunchState(phase="unknown", why="squeue timed out")])
def test_a_state_that_is_unknown_25_times_does_nothing(run: Elsewhere, answer: Any) -> None:
    """A healthy run is neither stopped nor started again nor given up because questions had no answer."""
    run.log("progress", 1, samples=50)
    run.launcher.answers = [RUNNING, *[answer] * 25, RUNNING, FINISHED]
    followed = run.follower().run()
    assert followed.state.phase == "finished"
    assert run.launcher.calls.count("state") == 28
    assert {"start", "stop"}.isdisjoint(run.launcher.calls)
    launch = run.here.read_launch()
    assert launch is not None
    assert [state.phase for state in launch.states] == ["running", "finished"]


def test_a_silent_run_is_said_to_be_stalled_once_and_left_alone(run: Elsewhere) -> None:
    """By its forecast's time of an update; an event ends the silence."""
    run.log("started", 0, samples=0)
    run.log("evaluated", 1, split="valid", took_s=40.0)
    count = 0

    def meanwhile() -> None:
        nonlocal count
        count += 1
        if count == 60:
            run.launcher.answers = [FINISHED]

    run.launcher.meanwhile = meanwhile
    run.follower().run()
    said = [message for message in run.messages() if message.startswith("stalled?")]
    assert len(said) == 1
    assert "No event for 2 min" in said[0]
    assert "40.0 s" in said[0]
    assert "stop" not in run.launcher.calls


def test_silence_of_a_cut_line_is_no_silence_of_the_run(run: Elsewhere) -> None:
    """While the place does not answer, nothing is known of the run, so nothing is said of it."""
    run.log("progress", 1, samples=50)
    run.launcher.cut_for = 30
    run.launcher.answers = [RUNNING, FINISHED]
    run.follower().run()
    assert run.clock.now_s > 300
    assert not any(message.startswith("stalled?") for message in run.messages())


def test_ctrl_c_detaches_or_stops(run: Elsewhere) -> None:
    """Detached, the run goes on untouched; stopped, it is followed until it has saved and left, and comes home."""
    presses = 0

    def press() -> None:
        nonlocal presses
        presses += 1
        if presses == 2:
            raise KeyboardInterrupt

    run.launcher.meanwhile = press
    followed = run.follower(ask=lambda: "detach").run()
    assert (followed.is_detached, followed.exit_code) == (True, 130)
    assert "stop" not in run.launcher.calls
    presses = 0
    run.launcher.after_stop = [STOPPED]
    followed = run.follower(ask=lambda: "stop").run()
    assert (followed.is_detached, followed.exit_code, followed.is_home) == (False, 130, True)
    assert run.launcher.calls.count("stop") == 1


def test_a_stop_that_meets_a_cut_line_is_asked_for_again(run: Elsewhere, monkeypatch: pytest.MonkeyPatch) -> None:
    """The user's word holds until it has arrived, is said once, and is not repeated after that."""
    run.launcher.answers, run.launcher.after_stop = [*[RUNNING] * 9, FINISHED], [RUNNING, RUNNING, STOPPED]
    stop, cuts = run.launcher.stop, [SILENT] * 3

    def stop_or_cut(handle: Any) -> None:
        if cuts:
            raise cuts.pop()
        stop(handle)

    monkeypatch.setattr(run.launcher, "stop", stop_or_cut)
    follower = run.follower()
    follower.stop("asked to stop")
    followed = follower.run()
    assert (followed.state.phase, followed.is_home) == ("stopped", True)
    assert run.launcher.calls.count("stop") == 1
    assert sum("was not asked to stop yet" in message for message in run.messages()) == 1
    assert run.messages().count("asked to stop") == 1


def test_a_preempted_run_is_shown_on_after_its_stop(run: Elsewhere) -> None:
    """A live display ends with the first `stopped`, so one that others follow is a note; the last one is itself."""
    run.log("stopped", 1, reason="SIGTERM", samples=50)
    run.log("resumed", 9, samples=50)
    run.log("stopped", 20, reason="SIGTERM", samples=70)
    run.launcher.answers = [STOPPED]
    run.follower().run()
    kinds = [event.kind for event in run.shown if "place" not in event.fields]
    assert kinds == ["noted", "resumed", "stopped"]
    run.shown.clear()
    run.follower(holds_stops=False).run()
    assert [event.kind for event in run.shown if "place" not in event.fields] == ["stopped", "resumed", "stopped"]


def test_a_run_that_cannot_be_fetched_is_left_there(run: Elsewhere, monkeypatch: pytest.MonkeyPatch) -> None:
    """A refusal is reported; a place that does not answer is asked several times first."""
    run.launcher.answers = [FINISHED]
    errors = [SILENT, SILENT, PlaceFailed("the run's directory is gone")]

    def refuse(handle: Any, into: Path) -> None:
        raise errors.pop(0)

    monkeypatch.setattr(run.launcher, "fetch", refuse)
    followed = run.follower().run()
    assert (followed.is_home, followed.problem, followed.exit_code) == (False, "the run's directory is gone", 4)


def test_a_directory_that_is_in_use_here_is_fetched_later(run: Elsewhere) -> None:
    """As while another client fetches it: how the run ended is said all the same."""
    run.launcher.answers = [FINISHED]
    with RunLock(run.here.path):
        followed = run.follower().run()
    assert (followed.state.phase, followed.is_home) == ("finished", False)
    assert "is in use by this process" in followed.problem


def test_the_place_changes_neither_the_record_nor_the_code_here(run: Elsewhere) -> None:
    """The copy of the job is code that runs here: a place that sends another one, or more of it, is not heard."""
    (run.here.path / "job").mkdir()
    (run.here.path / "job" / "blobs.py").write_text("mine = 1")
    (run.there / "job").mkdir()
    for name in ("job/blobs.py", "job/more.py", "launch.json", "started.json"):
        (run.there / name).write_text("theirs = 1")
    (run.there / "model.safetensors").write_bytes(b"weights")
    run.launcher.answers = [FINISHED]
    assert run.follower().run().is_home
    assert {path.name: path.read_text() for path in (run.here.path / "job").iterdir()} == {"blobs.py": "mine = 1"}
    assert run.here.read_launch() is not None
    assert not (run.here.path / "started.json").exists()
    assert (run.here.path / "model.safetensors").exists()


def test_a_run_that_finished_before_its_place_forgot_it_is_finished(run: Elsewhere) -> None:
    """As a Job that Kubernetes deleted a week after its end: what came home says how it ended."""
    make_run(run.there, 200, "finished")
    run.log("finished", 1, samples=200)
    run.launcher.answers = [STOPPED]
    followed = run.follower().run()
    assert (followed.state.phase, followed.exit_code) == ("finished", 0)
    launch = run.here.read_launch()
    assert launch is not None
    assert launch.state.phase == "finished"


def make_run(directory: Path, samples: int, status: RunStatus = "unfinished") -> None:
    """The record of a run that came to `samples`."""
    RunDirectory(directory).write(
        RUN,
        Run(
            name=directory.name,
            status=status,
            created_at="2026-11-25T10:00:00+00:00",
            spec_digest="3" * 64,
            total_samples=200,
            samples=samples,
        ),
    )


def test_a_run_that_went_on_here_is_not_replaced_by_the_older_one_there(run: Elsewhere) -> None:
    """As after `--resume` here of a run that was stopped there: record and log here stay, and the refusal says so."""
    make_run(run.there, 50)
    run.log("stopped", 1, samples=50)
    run.launcher.answers = [STOPPED]
    assert run.follower().run().is_home
    with run.here.events_path.open("ab") as file:
        file.write(log_of(run).replace(b"50", b"100"))
    make_run(run.here.path, 100)
    before = log_of(run)
    with pytest.raises(BadRun, match=r"is further here \(100 samples\) than at fake:box \(50\)"):
        fetch_run(run.here)
    assert not run.follower().run().is_home
    assert (run.here.read_run().samples, log_of(run)) == (100, before)
    run.log("resumed", 2, samples=50)  # another branch there, which comes further
    for samples in (70, 150):
        run.log("checkpointed", 3, samples=samples)
        make_run(run.there, samples)
        followed = run.follower().run()
        assert followed.is_home == (samples == 150), followed.problem
    assert run.here.read_run().samples == 150
    assert (run.here.path / "events-1.jsonl").read_bytes() == before


def test_a_shorter_log_there_does_not_replace_the_one_here(run: Elsewhere) -> None:
    """Following finds nothing new in it, so the fetch at the end has to keep the log here."""
    for number in range(9):
        run.log("progress", number, samples=number)
    run.follower(is_watching=False).run()
    before = log_of(run)
    (run.there / "events.jsonl").unlink()
    run.log("finished", 20, samples=60)
    run.launcher.answers = [FINISHED]
    assert run.follower().run().is_home
    assert (run.here.path / "events-1.jsonl").read_bytes() == before
    assert log_of(run) == (run.there / "events.jsonl").read_bytes()


def test_money_stops_a_run_before_its_limit(place: Path, fake_place: Any) -> None:
    """With time for a save left, and once; the record has what was spent."""
    run = Elsewhere.make(place, fake_place, price_per_h=36.0, max_cost=6.0)
    fake_place.answers = [RUNNING]
    fake_place.after_stop = [STOPPED]
    run.log("started", 0, samples=0)
    run.log("checkpointed", 10, samples=10, blocked_s=5.0, write_s=20.0)

    def train() -> None:
        run.log("progress", run.clock.now_s + 20, samples=20)

    fake_place.meanwhile = train
    followed = run.follower().run()
    assert followed.state.phase == "stopped"
    assert fake_place.calls.count("stop") == 1
    # 36 USD an hour are a cent a second: 600 s in all, less twice 25 s for a save.
    assert run.clock.now_s + 20 == pytest.approx(550, abs=8)
    assert any("$5.5" in message and "of $6.00" in message for message in run.messages())
    launch = run.here.read_launch()
    assert launch is not None
    assert launch.spent is not None
    assert launch.spent < 6.0


def test_a_run_that_came_home_teaches_the_next_estimate(run: Elsewhere) -> None:
    """Its wait in the queue and the start of its processes are remembered by place, each for itself."""
    began = dataclasses.replace(RUNNING, began_at="2026-11-25T10:00:10+00:00")
    run.launcher.answers = [began, FINISHED]
    run.log("planned", 25)
    run.log("started", 28, samples=0)
    run.log("progress", 30, samples=10)
    run.follower().run()
    lessons = lessons_of("fake:box")
    assert (lessons.num_runs, lessons.queue_s, lessons.startup_s) == (1, 70.0, 18.0)
    assert lessons_of("fake:other").num_runs == 0


def test_a_run_here_is_not_followed(place: Path, fake_place: Any) -> None:
    """It has no launch record."""
    run = Elsewhere.make(place, fake_place)
    (run.here.path / "launch.json").unlink()
    with pytest.raises(Exception, match="is not executed elsewhere"):
        Follower(directory=run.here, launcher=fake_place, sink=run.shown.append)


def test_a_line_longer_than_an_answer_does_not_hold_up_the_log(run: Elsewhere, monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers have a MiB at most, and a logged text more: it is read to its end; one without an end is refused."""
    run.log("logged", 1, samples=1, texts={"sample": "x" * 2_500_000})
    run.log("progress", 2, samples=2)
    whole = (run.there / "events.jsonl").read_bytes()
    stream = EventStream(run.here.events_path, lambda at: whole[at : at + 2**20])
    while stream.pull():
        pass
    assert log_of(run) == whole
    torn = whole + whole[:2_000_000]
    stream = EventStream(run.here.events_path, lambda at: torn[at : at + 2**20])
    assert stream.pull() == 0
    assert log_of(run) == whole
    monkeypatch.setattr("stoker.launching.follow.MOST_LINE_BYTES", 2**20)
    with pytest.raises(PlaceFailed, match=r"a line of the run's log there has more than 1.0 MiB"):
        stream.pull()


def test_a_run_that_always_has_more_to_say_is_still_asked_for_its_state(run: Elsewhere) -> None:
    """Each request takes as long as the run needs for its next event: money and state are looked at all the same."""
    run.launcher.answers = [RUNNING, FINISHED]
    original, calls = run.launcher.events, list[int]()

    def events(handle: Any, offset: int) -> bytes:
        calls.append(offset)
        assert len(calls) < 50, "the state is never asked for"
        if len(run.launcher.answers) > 1:
            run.clock.advance(1.0)
            run.log("progress", len(calls), samples=len(calls))
        content: bytes = original(handle, offset)
        return content

    run.launcher.events = events
    assert run.follower().run().state.phase == "finished"
    assert log_of(run) == (run.there / "events.jsonl").read_bytes()


def test_the_log_of_a_run_that_always_has_more_to_say_is_read_to_where_it_is(
    run: Elsewhere, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`stoker logs` ends: a request costs more time than the run takes between two events."""
    events, asked = run.launcher.events, list[int]()

    def read(handle: Any, offset: int) -> bytes:
        asked.append(offset)
        assert len(asked) < 10
        run.log("progress", len(asked), samples=len(asked))
        return bytes(events(handle, offset)[: 2 * MORE_BYTES])

    for number in range(3_000):  # more than an answer holds
        run.log("progress", 0, samples=number)
    monkeypatch.setattr(run.launcher, "events", read)
    assert run.follower(is_watching=False).run().is_detached
    shown = [event.fields["samples"] for event in run.shown if event.kind == "progress"]
    assert shown[-1] == len(asked) > 1


def test_a_follower_that_slept_does_not_overwrite_a_later_launch(run: Elsewhere) -> None:
    """Else the job that another command started would be lost to attach and stop, and go on costing."""
    follower = run.follower()
    launch = run.here.read_launch()
    assert launch is not None
    later = dataclasses.replace(launch, submitted_at="2026-11-25T11:00:00+00:00", handle={"job": "2"})
    run.here.write(LAUNCH, later)
    run.launcher.answers = [STOPPED]
    followed = follower.run()
    assert followed.is_detached
    assert run.here.read_launch() == later
    assert any("started again" in message for message in run.messages())


def test_a_run_that_waits_in_a_queue_is_not_said_to_be_stalled(run: Elsewhere) -> None:
    """After a kill without a last word it is silent because nothing of it runs."""
    run.log("progress", 1, samples=50)
    queued = LaunchState(phase="requeued", why="preempted", at="2026-11-25T10:00:20+00:00")
    run.launcher.answers = [queued]

    def wait() -> None:
        if run.clock.now_s > 4000:
            run.launcher.answers = [STOPPED]

    run.launcher.meanwhile = wait
    run.follower().run()
    assert not any("stalled" in message for message in run.messages())


def test_processes_that_began_before_the_answer_did_not_queue(run: Elsewhere) -> None:
    """By SSH they begin while the submission waits for its answer; an earlier start's processes say nothing."""
    launch = run.here.read_launch()
    assert launch is not None
    earlier = dataclasses.replace(RUNNING, at="2026-11-25T09:50:00+00:00", began_at="2026-11-25T09:50:00+00:00")
    submitted = LaunchState(phase="queued", why="submitted", at=launch.submitted_at)
    began = dataclasses.replace(RUNNING, at="2026-11-25T09:59:00+00:00", began_at="2026-11-25T09:58:59.500+00:00")
    run.log("started", 1, samples=0)
    events = [read_event(line) for line in (run.there / "events.jsonl").read_bytes().splitlines()]
    launch = dataclasses.replace(launch, states=(earlier, submitted, began))
    assert launch_waits(launch, events) == (0.0, pytest.approx(61.5))
