import json
import threading
from pathlib import Path

import pytest

from stoker.records import Event, JobSpec, Run
from stoker.store import RunDirectory
from stoker.tracking.base import MetricPoint, RunDescription
from stoker.tracking.run_tracking import BackgroundUploads, RunUpload

SPEC = JobSpec(
    name="job",
    entry=None,
    entry_digest=None,
    parameters={"lr": 0.1},
    settings={"optimizer": {"lr": 0.1}, "batch": 8},
    data_class="indexed",
    data_fingerprint="f",
    num_train=9,
    weights_digest="w",
)
RUN = Run(
    name="r", status="unfinished", created_at="2026-01-01T00:00:00+00:00", spec_digest=SPEC.digest(), total_samples=9
)


class Remembering:
    """A tracker that remembers; it fails while `is_down`, and waits for `gate` where there is one."""

    def __init__(self) -> None:
        self.points: list[MetricPoint] = []
        self.ends: list[str] = []
        self.opened: list[str | None] = []
        self.is_down, self.is_closed = False, False
        self.gate: threading.Event | None = None
        self.tried = threading.Event()
        self.id, self.where = "id-1", "there"

    def open(self, about: RunDescription, known_id: str | None) -> "Remembering":
        self.tried.set()
        if self.is_down:
            raise ConnectionError("refused")
        self.opened.append(known_id)
        self.about = about
        return self

    def log(self, points: list[MetricPoint]) -> None:
        if self.gate is not None:
            self.gate.wait()
        if self.is_down:
            raise ConnectionError("refused")
        self.points += points

    def go_back(self, samples: int) -> None:
        self.points = [point for point in self.points if point.samples <= samples]

    def end(self, status: str, files: list[Path]) -> None:
        self.ends.append(status)

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    """A run with nothing in its log."""
    return RunDirectory.create(tmp_path / "r", RUN, SPEC)


def happened(directory: RunDirectory, samples: int) -> Event:
    """A progress event that the run's log has."""
    event = Event(kind="progress", at=float(samples), fields={"samples": samples, "loss": 1.0 / samples})
    directory.append_event(event)
    return event


def sent(tracker: Remembering) -> list[int]:
    """Where the points that came to it are."""
    return [point.samples for point in tracker.points]


def test_a_tracker_is_sent_every_event_once_and_the_settings(directory: RunDirectory) -> None:
    """What the log has arrives in its order, with the job's settings flat, and the run's state at the end."""
    tracker = Remembering()
    following = BackgroundUploads([RunUpload(directory, "remembering", tracker.open)], pytest.fail, pause_s=0.0)
    for samples in range(1, 30):
        following(happened(directory, samples))
    following.close()
    assert sent(tracker) == list(range(1, 30))
    assert tracker.about.parameters == {"lr": "0.1", "optimizer.lr": "0.1", "batch": "8"}
    assert (tracker.ends, tracker.is_closed) == (["unfinished"], True)


def test_a_continued_run_stays_one_run_there(directory: RunDirectory) -> None:
    """The next process sends what came since, under the id that the tracker gave the first time."""
    first, second = Remembering(), Remembering()
    happened(directory, 1)
    shipment = RunUpload(directory, "remembering", first.open)
    assert shipment.send() == 1
    shipment.close()
    happened(directory, 2)
    assert RunUpload(directory, "remembering", second.open).send() == 1
    assert (sent(first), sent(second), second.opened) == ([1], [2], ["id-1"])


def test_a_tracker_that_is_down_costs_the_run_nothing_and_gets_everything_later(directory: RunDirectory) -> None:
    """It is reported once, what to do is reported at the end, and the events are sent when it is back."""
    tracker, words = Remembering(), list[str]()
    tracker.is_down = True
    following = BackgroundUploads([RunUpload(directory, "remembering", tracker.open)], words.append, pause_s=0.0)
    following(happened(directory, 1))
    assert tracker.tried.wait(timeout=60)
    following(happened(directory, 2))
    following.close()
    assert sum("cannot be reached, the run goes on (ConnectionError: refused)" in one for one in words) == 1
    assert "stoker runs track r --to remembering" in words[-1]
    tracker.is_down = False
    again = RunUpload(directory, "remembering", tracker.open)
    assert (again.send(), sent(tracker)) == (2, [1, 2])


def test_a_password_in_a_trackers_address_stays_out_of_the_run(directory: RunDirectory) -> None:
    """Messages go into the log, which is shown and mirrored; neither they nor the upload's state have it."""
    address, words, tracker = "https://me:s3cret@mlflow.example?key=s3cret", list[str](), Remembering()

    def fail(about: RunDescription, known_id: str | None) -> Remembering:
        raise ConnectionError(f"no answer from {address}")

    following = BackgroundUploads([RunUpload(directory, f"mlflow={address}", fail)], words.append, pause_s=0.0)
    following(happened(directory, 1))
    following.close()
    assert "mlflow=https://…@mlflow.example?… cannot be reached" in words[0]
    assert "`stoker runs track r --to mlflow=https://…@mlflow.example?…`" in words[-1]
    tracker.where = address
    upload = RunUpload(directory, f"mlflow={address}", tracker.open)
    assert (upload.send(), upload.where) == (1, "https://…@mlflow.example?…")
    assert "s3cret" not in upload.state_path.read_text("utf-8") + "".join(words)


def test_what_a_tracker_refused_is_sent_again(directory: RunDirectory) -> None:
    """A connection that breaks while values are sent: they count as sent only once they were taken."""
    tracker = Remembering()
    happened(directory, 1)
    shipment = RunUpload(directory, "remembering", tracker.open)
    shipment.send()
    happened(directory, 2)
    tracker.is_down = True
    with pytest.raises(ConnectionError):
        shipment.send()
    tracker.is_down = False
    assert (RunUpload(directory, "remembering", tracker.open).send(), sent(tracker)) == (1, [1, 2])


def test_an_attempt_that_is_made_again_takes_nothing_back(directory: RunDirectory) -> None:
    """The same events are read again: their first one lies before the last one of the attempt that failed."""
    tracker, back = Remembering(), list[int]()
    tracker.go_back = back.append  # type: ignore[method-assign]
    upload = RunUpload(directory, "remembering", tracker.open)
    happened(directory, 1)
    upload.send()
    happened(directory, 2)
    happened(directory, 3)
    tracker.is_down = True
    with pytest.raises(ConnectionError):
        upload.send()
    tracker.is_down = False
    upload.send()
    assert (back, sent(tracker)) == ([], [1, 2, 3])


def test_a_tracker_that_hangs_does_not_keep_a_run_from_ending(directory: RunDirectory) -> None:
    """The end waits for a stated time, and says that not everything was sent."""
    tracker, words = Remembering(), list[str]()
    tracker.gate = threading.Event()
    following = BackgroundUploads([RunUpload(directory, "remembering", tracker.open)], words.append, pause_s=0.0)
    following(happened(directory, 1))
    following.close(patience_s=0.05)
    assert "it did not answer for 0.05 s" in words[-1]
    tracker.gate.set()


def test_a_run_that_kept_nothing_and_is_gone_is_noted_as_failed(directory: RunDirectory) -> None:
    """Its tracker is closed; events that could be sent later are not counted as lost."""
    tracker = Remembering()
    following = BackgroundUploads([RunUpload(directory, "remembering", tracker.open)], pytest.fail, pause_s=0.0)
    following(happened(directory, 1))
    assert tracker.tried.wait(timeout=60)
    directory.discard()
    following.close()
    assert (tracker.ends, tracker.is_closed) == (["failed"], True)
    assert not directory.path.exists()


def test_events_that_were_sent_before_a_kill_are_not_lost_by_it(directory: RunDirectory) -> None:
    """What was sent is noted after it was sent: a kill in between sends some points twice, none never."""
    tracker = Remembering()
    happened(directory, 1)
    shipment = RunUpload(directory, "remembering", tracker.open)
    shipment.send()
    state = json.loads(shipment.state_path.read_text("utf-8"))
    shipment.state_path.write_text(json.dumps(state | {"sent_bytes": 0}), "utf-8")  # as if killed before the note
    happened(directory, 2)
    RunUpload(directory, "remembering", tracker.open).send()
    assert sent(tracker) == [1, 1, 2]


@pytest.mark.parametrize("sent_before", [0, 2, 5, 6])
def test_what_a_killed_run_makes_again_is_sent_once(directory: RunDirectory, sent_before: int) -> None:
    """Its curve does not run twice over the same samples, however much a tracker had before the kill."""
    tracker = Remembering()
    for samples in range(1, sent_before + 1):
        happened(directory, samples)
    upload = RunUpload(directory, "remembering", tracker.open)
    upload.send()
    for samples in range(sent_before + 1, 7):
        happened(directory, samples)
    directory.append_event(Event(kind="resumed", at=7.0, fields={"samples": 3, "updates": 3}))
    for samples in (4, 5, 6, 7):
        happened(directory, samples)
    upload.send()
    assert sent(tracker) == [1, 2, 3, 4, 5, 6, 7]


def test_an_event_that_is_being_written_waits(directory: RunDirectory) -> None:
    """Half a line in the log is left for the next sending, and then sent whole."""
    tracker = Remembering()
    happened(directory, 1)
    whole = directory.events_path.read_bytes()
    directory.events_path.write_bytes(whole + whole[:20])
    shipment = RunUpload(directory, "remembering", tracker.open)
    assert shipment.send() == 1
    directory.events_path.write_bytes(whole + whole)
    assert (shipment.send(), sent(tracker)) == (1, [1, 1])
