"""A Ray dashboard's API of jobs, which runs the jobs as processes of this machine.

Routes, fields and texts are those of Ray 2.60 on a machine with two cores, recorded on 2026-11-25.
"""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import threading
import zipfile
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self

VERSION = {
    "version": "4",
    "ray_version": "2.60.0",
    "ray_commit": "b7f4259e944bf6959f721b106adc366ddfa0c356",
    "session_name": "session_2026-11-25_23-14-46_731726_4476",
}
NODES = {
    "result": True,
    "msg": "",
    "data": {
        "result": {
            "total": 1,
            "num_after_truncation": 1,
            "num_filtered": 1,
            "partial_failure_warning": "",
            "warnings": None,
            "result": [
                {
                    "node_id": "47d81c5e392b779b5902608068884f186f67c6e2b68a37ec521d2015",
                    "node_ip": "192.0.2.2",
                    "is_head_node": True,
                    "state": "ALIVE",
                    "state_message": None,
                    "node_name": "192.0.2.2",
                    "resources_total": {
                        "node:192.0.2.2": 1.0,
                        "node:__internal_head__": 1.0,
                        "CPU": 2.0,
                        "object_store_memory": 7028536934.0,
                        "memory": 16399919514.0,
                    },
                }
            ],
        }
    },
}
STATUS = {
    "result": True,
    "msg": "Got cluster status.",
    "data": {
        "autoscalingStatus": None,
        "autoscalingError": None,
        "clusterStatus": {"gcsRequestTime": 0.0015, "loadMetricsReport": {"usage": {}, "usageByNode": {}}},
    },
}
NOISE = "2026-11-25 23:20:01,000\tINFO job_manager.py:568 -- Runtime env is setting up.\n"


@dataclass
class Job:
    """A job: what was posted, and its process."""

    body: dict[str, Any]
    log: Path
    process: subprocess.Popen[bytes] | None = None
    is_stopped: bool = False

    def status(self) -> str:
        """As Ray says it: a job has ended once all of its processes have, not only the shell."""
        if self.process is None:
            return "PENDING"
        code = self.process.poll()
        if code is None or self._has_others():
            return "RUNNING"
        return "STOPPED" if self.is_stopped else "SUCCEEDED" if code == 0 else "FAILED"

    def _has_others(self) -> bool:
        """Whether processes of the job's session go on after its shell."""
        assert self.process is not None
        try:
            os.killpg(self.process.pid, 0)
        except ProcessLookupError:
            return False
        return True


@dataclass
class FakeRay:
    """The head of a cluster, as a context manager."""

    folder: Path
    nodes: dict[str, Any] = field(default_factory=lambda: NODES)
    jobs: dict[str, Job] = field(default_factory=dict)
    packages: dict[str, bytes] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    holds: bool = False
    """Jobs stay pending."""

    def __enter__(self) -> Self:
        """Serve on a free port."""
        head = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: Any) -> None:
                pass

            def answer(self, code: int, body: Any = "") -> None:
                content = (body if isinstance(body, str) else json.dumps(body)).encode()
                self.send_response(code)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def handle_any(self) -> None:
                size = int(self.headers.get("Content-Length") or 0)
                head.requests.append(f"{self.command} {self.path}")
                self.answer(*head.respond(self.command, self.path, self.rfile.read(size)))

            do_GET = do_PUT = do_POST = do_DELETE = handle_any  # noqa: N815 - names of http.server

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        """End the server and the jobs."""
        self._server.shutdown()
        self._server.server_close()
        for job in self.jobs.values():
            if job.process is not None and job.process.poll() is None:
                os.killpg(job.process.pid, signal.SIGKILL)
                job.process.wait()

    @property
    def word(self) -> str:
        """The word of `--on`, without its kind."""
        return f"127.0.0.1:{self._server.server_address[1]}"

    def respond(self, method: str, path: str, body: bytes) -> tuple[int, Any]:
        """Status and body of the answer to a request."""
        if path == "/api/version":
            return 200, VERSION
        if path.startswith("/api/v0/nodes"):
            return 200, self.nodes
        if path == "/api/cluster_status":
            return 200, STATUS
        if match := re.fullmatch(r"/api/packages/gcs/(_ray_pkg_[0-9a-f]+\.zip)", path):
            if method == "PUT":
                self.packages[match[1]] = body
                return 200, ""
            return (200, "") if match[1] in self.packages else (404, f"Package gcs://{match[1]} does not exist")
        if path == "/api/jobs/":
            return (200, self._start(json.loads(body))) if method == "POST" else (200, [*map(self._info, self.jobs)])
        if match := re.fullmatch(r"/api/jobs/([^/]+)(/logs|/stop)?", path):
            return self._of_job(method, match[1], match[2] or "")
        return 404, "404: Not Found"

    def _of_job(self, method: str, name: str, what: str) -> tuple[int, Any]:
        if name not in self.jobs:
            return 404, f"Job {name} does not exist"
        job = self.jobs[name]
        if what == "/logs":
            return 200, {"logs": NOISE + (job.log.read_text() if job.log.exists() else "")}
        if what == "/stop":
            job.is_stopped = True
            if job.process is not None and job.process.poll() is None:
                os.killpg(job.process.pid, signal.SIGTERM)
            return 200, {"stopped": True}
        if method == "DELETE":
            del self.jobs[name]
            return 200, {"deleted": True}
        return 200, self._info(name)

    def _start(self, body: dict[str, Any]) -> dict[str, str]:
        name = body.get("submission_id") or f"raysubmit_{len(self.jobs)}"
        work = self.folder / f"package-{name}"
        package = self.packages[body["runtime_env"]["working_dir"].removeprefix("gcs://")]
        zipfile.ZipFile(io.BytesIO(package)).extractall(work)
        job = self.jobs[name] = Job(body, self.folder / f"{name}.log")
        if not self.holds:
            with job.log.open("wb") as log:
                job.process = subprocess.Popen(  # noqa: S602 - as Ray does
                    body["entrypoint"],
                    shell=True,
                    cwd=work,
                    start_new_session=True,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=os.environ | body["runtime_env"].get("env_vars", {}),
                )
        return {"job_id": name, "submission_id": name}

    def _info(self, name: str) -> dict[str, Any]:
        job = self.jobs[name]
        code = None if job.process is None else job.process.poll()
        return {
            "type": "SUBMISSION",
            "job_id": "01000000",
            "submission_id": name,
            "status": job.status(),
            "entrypoint": job.body["entrypoint"],
            "message": f"status is {job.status()}",
            "error_type": None,
            "metadata": job.body.get("metadata"),
            "runtime_env": job.body["runtime_env"],
            "driver_agent_http_address": "http://192.0.2.2:52365",
            "driver_exit_code": code,
        }
