"""KServe's inference clients against the wire, in an environment of their own.

    python -m bench.serving.kserve_clients [--environment DIR]

`kserve` brings Kubernetes' client, FastAPI, pandas and an older psutil, so that it does not go into Stoker's own
environment; and its messages of gRPC have the same names as Triton's, so that both cannot be in one process. This makes
an environment (kept, if a directory is given; used, if it is there), installs `kserve`, serves a model that computes in
NumPy over both protocols, and lets KServe's clients ask: the scenario of tests/serving. What they asked is written to
bench/results/; an answer that is not the expected one ends it.
"""

from __future__ import annotations

import argparse
import platform
import subprocess
import sys
import tempfile
import venv
from datetime import UTC, datetime
from pathlib import Path

import grpc
import numpy as np
import uvicorn

from bench.train.results import document, save
from stoker.serving.service import ServerContext
from tests.serving.clients import Subject, kserve
from tests.serving.fakes import FakeService, scores_of
from tests.serving.running import running


def environment(directory: Path) -> str:
    """The Python of an environment that has `kserve`; made where there is none yet."""
    python = directory / "bin" / "python"
    if not python.exists():
        venv.create(directory, with_pip=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", "kserve"], check=True, stdout=sys.stderr)
    return str(python)


def main() -> None:
    """Ask, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--environment", type=Path)
    options = parser.parse_args()
    image = np.random.default_rng(0).standard_normal((2, 8, 8), np.float32)
    with tempfile.TemporaryDirectory() as aside, running(ServerContext(service=FakeService())) as where:
        python = environment(options.environment or Path(aside) / "kserve")
        subject = Subject(
            http=where.http,
            grpc=where.grpc,
            model="digits",
            inputs={"image": image},
            outputs={"scores": scores_of(image)},
        )
        told = kserve(subject, python)
    print(told)
    versions = {
        "python": platform.python_version(),
        "kserve": told["kserve"],
        "uvicorn": uvicorn.__version__,
        "grpc": grpc.__version__,
    }
    content = document(
        "What KServe's inference clients asked and were answered", "python -m bench.serving.kserve_clients", versions
    )
    content |= {"answered": {"rest": told["rest"], "grpc": told["grpc"]}}
    save(Path(f"bench/results/kserve_clients_{datetime.now(UTC):%Y-%m-%d}.json"), content)


if __name__ == "__main__":
    main()
