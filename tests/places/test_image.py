"""An image of a job, run by rootless Podman: it trains to the same bits as without a container."""

from __future__ import annotations

import dataclasses
import json
import subprocess
from pathlib import Path

import pytest

from stoker.records import dumps
from tests.flow.builders import PLAN
from tests.flow.command import command, job_file, stoker_process
from tests.places.podman import podman, reason_against

pytestmark = [
    pytest.mark.places,
    pytest.mark.skipif(reason_against() is not None, reason=str(reason_against())),
]


def test_a_container_trains_to_the_same_bits(place: Path) -> None:
    """Weights under one plan are equal within and without, and `stoker verify` within finds nothing."""
    job_file()
    with podman() as run:
        # In a fresh interpreter: what the tests have loaded is no package of the job.
        words = command("image", "blobs.py", "-o", run.folder / "image.tar", "--json")
        made = subprocess.run(words, capture_output=True, text=True, check=False)
        assert made.returncode == 0, made.stderr
        plan = run.folder / "plan.json"
        plan.write_text(dumps(dataclasses.replace(PLAN, threads=1)))
        loaded = run("load", "-i", run.folder / "image.tar")
        assert loaded.returncode == 0, loaded.stderr
        reference = json.loads(made.stdout)["reference"]
        assert reference in loaded.stdout
        script = "stoker train blobs.py --plan /plan.json --run-dir /runs/inside && stoker verify blobs.py"
        inside = run(
            "run",
            "--rm",
            "--cgroups=disabled",
            "--network=none",
            "-e",
            "OMP_NUM_THREADS=1",
            "-v",
            f"{run.folder}/runs:/runs",
            "-v",
            f"{plan}:/plan.json:ro",
            "--entrypoint",
            "/bin/sh",
            reference,
            "-c",
            script,
        )
        assert inside.returncode == 0, inside.stderr
        assert "holds: " in inside.stdout
        outside = stoker_process("train", "blobs.py", "--plan", plan, "--run-dir", "outside")
        assert outside.code == 0, outside.err
        weights = (run.folder / "runs" / "inside" / "model.safetensors").read_bytes()
        assert weights == Path("outside/model.safetensors").read_bytes()
