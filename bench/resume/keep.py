"""What a mirror costs training: CPU time of its threads for each checkpoint, against a server of S3's API (moto).

    python -m bench.resume.keep [--updates 150] [--url file://…]

The job is the small GPT of the proofs of resuming, in one thread, with a checkpoint every second. CPU time is counted
and not seconds, so that neighbours do not matter: the threads of the mirror (its own, and the one in which fsspec
talks) can slow training by no more than that, even if no core is free. Their imports, before training, are not
counted; records and pieces of the log that go with a checkpoint are. The share is of the 30 s between two checkpoints
of a small model. The result goes to bench/results/. Needs s3fs and moto, or a --url.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from pathlib import Path

import torch

import stoker
from bench.resume.jobs.gpt import job
from bench.resume.kill import HERE, PLANS
from stoker.records import Event

USUAL_S = 30.0
"""Time between two checkpoints of a small model on a CPU [s]."""


@contextmanager
def served() -> Iterator[str]:
    """A server with a bucket, which s3fs finds by its usual variables."""
    import s3fs  # noqa: PLC0415 - not needed with --url

    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    process = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.environ.update(
        AWS_ENDPOINT_URL=f"http://127.0.0.1:{port}",
        AWS_ACCESS_KEY_ID="x",
        AWS_SECRET_ACCESS_KEY="x",  # noqa: S106 - moto takes any
        AWS_DEFAULT_REGION="us-east-1",
        no_proxy="127.0.0.1",
    )
    try:
        for _ in range(300):
            try:
                s3fs.S3FileSystem(skip_instance_cache=True).mkdir("bucket")
                break
            except OSError:
                time.sleep(0.2)
        yield "s3://bucket/runs"
    finally:
        process.kill()
        process.wait()


def cpu_s() -> dict[str, float]:
    """CPU time of each thread of this process so far [s], by name."""
    ticks, found = os.sysconf("SC_CLK_TCK"), dict[str, float]()
    for thread in threading.enumerate():
        fields = Path(f"/proc/self/task/{thread.native_id}/stat").read_text().rpartition(")")[2].split()
        found[thread.name] = found.get(thread.name, 0.0) + (int(fields[11]) + int(fields[12])) / ticks
    return found


class Counting:
    """A sink that counts CPU time between the first and the last progress of a run."""

    def __init__(self) -> None:
        self.first: dict[str, float] | None = None
        self.last: dict[str, float] = {}
        self.saved, self.num_bytes = 0, 0

    def __call__(self, event: Event) -> None:
        """Take in an event."""
        if event.kind == "progress":
            self.last = cpu_s()
            self.first = self.first or self.last
        if event.kind == "checkpointed":
            self.saved, self.num_bytes = self.saved + 1, event.fields["bytes"]

    def of(self, *names: str) -> float:
        """CPU time of threads [s]."""
        return sum(self.last.get(name, 0.0) - (self.first or {}).get(name, 0.0) for name in names)


def main() -> int:
    """Measure; 0 if a run that saves every 30 s is slowed by less than 2 %."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=150)
    parser.add_argument("--url", default="")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        url = options.url or stack.enter_context(served())
        plan, counting = dataclasses.replace(PLANS["gpt"], threads=1, checkpoint_every_s=1.0), Counting()
        stoker.train(job(options.updates), plan=plan, run_dir=f"{folder}/run", keep=url, sink=counting)
    training_s, mirror_s = counting.of("MainThread"), counting.of("stoker-mirror", "fsspecIO")
    each_s = mirror_s / counting.saved
    measured = {
        "checkpoints": counting.saved,
        "checkpoint_bytes": counting.num_bytes,
        "training_cpu_s": training_s,
        "mirror_cpu_s": mirror_s,
        "cpu_s_for_each": each_s,
        "share_every_30_s": each_s / USUAL_S,
    }
    print(measured)
    date = datetime.now(UTC).date().isoformat()
    result = {
        "what": "CPU time of the mirror's threads for each checkpoint",
        "date": date,
        "torch": torch.__version__,
        "machine": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "command": " ".join(["python -m bench.resume.keep", *sys.argv[1:]]),
        **measured,
    }
    path = HERE.parent / "results" / f"keep_{date}.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(f"written to {path}")
    return 0 if each_s / USUAL_S < 0.02 else 1


if __name__ == "__main__":
    sys.exit(main())
