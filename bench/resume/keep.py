"""What a mirror costs training: runs with and without `--keep`, in turns, against a server of S3's API (moto) here.

    python -m bench.resume.keep [--pairs 4] [--url file://…]

The job is the small GPT of the proofs of resuming, in one thread of two, with a checkpoint every second: far more often
than a run saves by itself. The server runs on the second core, as no bucket would. What counts is the time of training
itself, without the end that waits for the last upload. The result (ratios in pairs, their median and range, bytes of
checkpoints) goes to bench/results/. Needs s3fs and moto, or a --url.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path

import torch

from bench.resume.kill import HERE, PLANS
from stoker.records import dumps


def serve() -> tuple[subprocess.Popen[bytes], dict[str, str]]:
    """A server with a bucket, and the variables by which s3fs finds it."""
    import s3fs  # noqa: PLC0415 - not needed with --url

    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    process = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    variables = {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}", "AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x",
        "AWS_DEFAULT_REGION": "us-east-1", "no_proxy": "127.0.0.1",
    }  # fmt: skip
    os.environ.update(variables)
    for _ in range(100):
        try:
            s3fs.S3FileSystem(skip_instance_cache=True).mkdir("bucket")
            return process, variables
        except OSError:
            time.sleep(0.2)
    raise SystemExit("moto's server does not answer")


def main() -> int:
    """Measure; 0 if training is slowed by less than 2 %."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=4)
    parser.add_argument("--updates", type=int, default=600)
    parser.add_argument("--url", default="")
    options = parser.parse_args()
    server, variables = (None, dict[str, str]()) if options.url else serve()
    plan = dataclasses.replace(PLANS["gpt"], threads=1, checkpoint_every_s=1.0)
    pairs: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "plan.json").write_text(dumps(plan))

        def run(number: int, *more: str) -> tuple[float, int]:
            """Time of training [s], and the bytes of its checkpoints."""
            done = subprocess.run(
                [sys.executable, "-m", "stoker", "train", str(HERE / "jobs" / "gpt.py"), "--json", "--set",
                 f"updates={options.updates}", "--run-dir", str(folder / f"run{number}"), "--plan",
                 str(folder / "plan.json"), *more],
                capture_output=True, text=True, check=True, env=os.environ | variables,
            )  # fmt: skip
            events = [json.loads(line) for line in done.stdout.splitlines()]
            saved = sum(event["bytes"] for event in events if event["event"] == "checkpointed")
            wall = [event["wall_s"] for event in events if event["event"] == "progress"]
            return wall[-1] - wall[0], saved

        url = options.url or "s3://bucket/runs"
        for pair in range(options.pairs):
            order = (True, False) if pair % 2 else (False, True)
            took: dict[bool, float] = {}
            for kept in order:
                took[kept], num_bytes = run(2 * pair + kept, *(["--keep", url] if kept else []))
            ratio = took[True] / took[False]
            pairs.append({"plain_s": took[False], "kept_s": took[True], "ratio": ratio, "checkpoint_bytes": num_bytes})
            print(pairs[-1], flush=True)
    if server is not None:
        server.kill()
        server.wait()
    ratios = [one["ratio"] for one in pairs]
    median = statistics.median(ratios)
    print(f"training with --keep takes {median:.4f} times as long ({min(ratios):.4f} to {max(ratios):.4f})")
    date = datetime.now(UTC).date().isoformat()
    result = {
        "what": "time of training with --keep over without, in pairs", "date": date, "torch": torch.__version__,
        "machine": platform.processor() or platform.machine(), "cores": os.cpu_count(),
        "command": " ".join(["python -m bench.resume.keep", *sys.argv[1:]]), "pairs": pairs, "median_ratio": median,
    }  # fmt: skip
    path = HERE.parent / "results" / f"keep_{date}.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(f"written to {path}")
    return 0 if median < 1.02 else 1


if __name__ == "__main__":
    sys.exit(main())
