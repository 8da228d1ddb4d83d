"""The newest values of a run as Prometheus reads them: in a file, and at a Pushgateway."""

from __future__ import annotations

import math
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from urllib.error import HTTPError

import pytest

from stoker.tracking.base import MetricPoint, RunDescription, TrackerTarget
from stoker.tracking.prometheus_tracker import exposition

POINTS = [
    MetricPoint(samples=64, at=101.0, values={"train/loss": 0.5, "valid/accuracy": 0.75}),
    MetricPoint(samples=128, at=102.5, values={"train/loss": 0.25}),
]
NEWEST = (
    "# TYPE stoker_samples gauge\n"
    'stoker_samples{run="conv 1",name="job"} 128\n'
    "# TYPE stoker_at_seconds gauge\n"
    'stoker_at_seconds{run="conv 1",name="job"} 102.5\n'
    "# TYPE stoker_train_loss gauge\n"
    'stoker_train_loss{run="conv 1",name="job"} 0.25\n'
    "# TYPE stoker_valid_accuracy gauge\n"
    'stoker_valid_accuracy{run="conv 1",name="job"} 0.75\n'
    "# TYPE stoker_status gauge\n"
    'stoker_status{run="conv 1",name="job",status="STATUS"} 1\n'
)


def about(folder: Path) -> RunDescription:
    """A run whose name needs quoting in a URL."""
    return RunDescription(run="conv 1", job="job", folder=folder, created_at=100.0, parameters={})


def test_a_file_has_the_newest_values_and_at_the_end_the_status(tmp_path: Path) -> None:
    """One file, which is replaced: the collector never sees half of it; a continued run keeps it."""
    run = TrackerTarget("prometheus").open(about(tmp_path), None)
    run.log(POINTS)
    path = tmp_path / "metrics.prom"
    assert run.where == str(path)
    assert path.read_text() == NEWEST.replace("STATUS", "unfinished")
    run.end("finished", [])
    run.close()
    assert path.read_text() == NEWEST.replace("STATUS", "finished")
    again = TrackerTarget("prometheus").open(about(tmp_path), run.id)
    again.log(POINTS[1:])
    assert [one.name for one in tmp_path.iterdir()] == ["metrics.prom"]


def test_what_a_user_logs_replaces_none_of_its_own(tmp_path: Path) -> None:
    """Neither position, time nor status; a run that goes on from a checkpoint goes on here, too."""
    run = TrackerTarget("prometheus").open(about(tmp_path), None)
    run.log([MetricPoint(samples=8, at=9.0, values={"status": 1.0, "at_seconds": 1.0})])
    run.go_back(4)
    text = (tmp_path / "metrics.prom").read_text()
    assert text.count("# TYPE stoker_status gauge") == 1
    assert 'stoker_at_seconds{run="conv 1",name="job"} 9.0' in text


def test_a_gateway_gets_one_group_for_a_run(tmp_path: Path) -> None:
    """Each request replaces the group, so that nothing of an earlier start stays; a refusal is tried again."""
    asked: list[tuple[str, str, bytes]] = []

    class Gateway(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

        def do_PUT(self) -> None:
            asked.append((self.command, self.path, self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200 if len(asked) < 3 else 400)
            self.end_headers()

    with HTTPServer(("127.0.0.1", 0), Gateway) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        run = TrackerTarget("prometheus", f"http://127.0.0.1:{server.server_port}/").open(about(tmp_path), None)
        run.log(POINTS)
        run.end("failed", [])
        with pytest.raises(HTTPError):
            run.log(POINTS)
        server.shutdown()
    assert asked[:2] == [
        ("PUT", "/metrics/job/stoker/run/conv%201", NEWEST.replace("STATUS", status).encode())
        for status in ("unfinished", "failed")
    ]
    assert list(tmp_path.iterdir()) == []


def test_values_and_labels_are_written_as_prometheus_reads_them() -> None:
    """Infinities have signs, quotes are escaped, and names have letters, digits and underscores."""
    text = exposition({"train/lr/group-1": math.inf, "b": math.nan}, "failed", {"run": 'a"\\\n'})
    assert 'stoker_train_lr_group_1{run="a\\"\\\\\\n"} +Inf\n' in text
    assert '"} NaN\n' in text
