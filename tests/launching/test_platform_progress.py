"""Progress reported to Kubeflow's Trainer, against an endpoint of the test and the Trainer's own model."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from stoker.launching.at_place import newest_events
from stoker.launching.platform_progress import main, post, status_of
from stoker.records import Event, dumps, to_json
from tests.optional import optional

models = optional("kubeflow_trainer_api.models")

FIELDS = {"samples": 1536, "total_samples": 6144, "eta_s": 11.6, "loss": 2.3, "samples_per_s": 1122.9, "lr": 0.0039}
PROGRESS = Event(kind="progress", at=1795267563.8, fields={**FIELDS})
EVENT: Any = to_json(PROGRESS)


def test_the_newest_progress_is_found_behind_a_torn_line(tmp_path: Path) -> None:
    """The log is being written: its last line may be half there."""
    log = tmp_path / "events.jsonl"
    assert list(newest_events(log, "progress")) == []
    lines = [dumps(event, indent=None) for event in (replace(PROGRESS, at=1.0), PROGRESS, Event(kind="noted", at=2.0))]
    log.write_text("\n".join([*lines, '{"kind": "prog']))
    assert [event["at"] for event in newest_events(log, "progress")] == [PROGRESS.at, 1.0]


def test_a_status_is_what_the_trainer_s_model_accepts() -> None:
    """Every field is known to it, with the value it has."""
    body = status_of(EVENT)
    read = models.TrainerV1alpha1UpdateTrainJobStatusRequest.from_dict(body).to_dict()["trainerStatus"]
    assert read["progressPercentage"] == 25
    assert read["estimatedRemainingSeconds"] == 12
    assert {metric["name"]: metric["value"] for metric in read["metrics"]}["loss"] == "2.3"
    assert read.keys() == body["trainerStatus"].keys()


def test_it_is_posted_with_the_pod_s_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The log's newest progress, once, with the token of the file; the program outlives an endpoint that refuses."""
    seen: list[tuple[str, Any]] = []
    codes = [200, 403]

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            """Nothing."""

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            seen.append((self.headers["Authorization"], json.loads(body)))
            self.send_response(codes[len(seen) - 1])
            self.end_headers()

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    (tmp_path / "token").write_text("t0ken\n")
    environ = {
        "KUBEFLOW_TRAINER_STATUS_URL": f"http://127.0.0.1:{server.server_address[1]}/status",
        "KUBEFLOW_TRAINER_STATUS_TOKEN": str(tmp_path / "token"),
    }
    (tmp_path / "events.jsonl").write_text(dumps(PROGRESS, indent=None) + "\n")
    waits = iter([None, None])
    monkeypatch.setattr("stoker.launching.platform_progress.time.sleep", lambda _: next(waits))
    try:
        with pytest.raises(StopIteration):
            main(tmp_path, environ)
        assert seen == [("Bearer t0ken", status_of(EVENT))]
        with pytest.raises(OSError, match="403"):
            post(status_of(EVENT), environ)
    finally:
        server.shutdown()
        server.server_close()
