"""SkyPilot's command line with recorded answers of version 0.14.1, and a small catalogue."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

VMS = {
    "aws": """InstanceType,AcceleratorName,AcceleratorCount,vCPUs,MemoryGiB,GpuInfo,Price,SpotPrice,Region
g6.xlarge,L4,1,4,16,,0.8048,0.3,us-east-1
p4d.24xlarge,A100,8,96,1152,,21.9576,8.1,us-east-1
p5.48xlarge,H100,8,192,2048,,55.04,15.9,us-east-2
m6i.large,,,2,8,,0.096,0.04,us-east-1
""",
    "lambda": """InstanceType,AcceleratorName,AcceleratorCount,vCPUs,MemoryGiB,Price,Region,GpuInfo,SpotPrice
gpu_1x_h100_pcie,H100,1,26,200,2.49,us-west-3,,
gpu_1x_a10,A10,1,30,200,0.75,us-east-1,,
gpu_1x_l4,L4,1,8,64,0.79,us-east-1,,
""",
}
"""Rows in the form of SkyPilot's catalogue, version 8; the prices are for these tests."""

_PROGRAM = """#!{python}
import json, os, pathlib, sys
folder = pathlib.Path({folder!r})
words = sys.argv[1:]
with (folder / "calls").open("a") as calls:
    calls.write(json.dumps(words) + "\\n")
if words == ["--version"]:
    print("skypilot, version 0.14.1")
elif words == ["check", "--output", "json"]:
    print((folder / "check").read_text())
elif words == ["storage", "ls"]:
    print((folder / "storage").read_text())
elif words[:2] == ["jobs", "launch"]:
    if (folder / "refuses").exists():
        print("Choosing resources for managed jobs controller...")
        sys.stderr.write((folder / "refuses").read_text())
        sys.exit(1)
    task = json.loads(pathlib.Path(words[-1]).read_text())
    (folder / "task.json").write_text(json.dumps(task))
    (folder / "order.json").write_text((pathlib.Path(task["workdir"]) / "order.json").read_text())
    (folder / "sent").write_text("\\n".join(sorted(
        str(p.relative_to(task["workdir"])) for p in pathlib.Path(task["workdir"]).rglob("*") if p.is_file())))
    names = [n for w, n in zip(words, words[1:]) if w == "--secret"]
    (folder / "secrets").write_text(json.dumps({{n: os.environ[n] for n in names}}))
    print("Managed job submitted, ID: 7")
elif words[:2] == ["jobs", "queue"]:
    print("\\x1b[33mRestarting managed jobs controller...\\x1b[0m")
    if not (folder / "queue").exists():
        sys.exit("sky.exceptions.ClusterDoesNotExist: Cluster 'sky-jobs-controller-fcd1e5cf' does not exist.")
    print((folder / "queue").read_text())
elif words[:2] == ["jobs", "logs"]:
    print((folder / "log").read_text(), end="")
elif words[:2] == ["jobs", "cancel"]:
    print("Managed job cancelled")
else:
    sys.exit("unknown command " + " ".join(words))
"""


@pytest.fixture
def sky(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder of the answers: `queue` and `check` (JSON), `storage`, `log`, `refuses`; launches are noted there.

    Without `queue` SkyPilot has no controller of jobs yet.
    """
    folder, program = tmp_path / "sky", tmp_path / "bin" / "sky"
    folder.mkdir()
    program.parent.mkdir()
    program.write_text(_PROGRAM.format(python=sys.executable, folder=str(folder)))
    program.chmod(0o755)
    for cloud, rows in VMS.items():
        file = tmp_path / "runtime/.sky/catalogs/v8" / cloud / "vms.csv"
        file.parent.mkdir(parents=True)
        file.write_text(rows)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
    monkeypatch.setenv("SKY_RUNTIME_DIR", str(tmp_path / "runtime"))
    job_is(folder, None)
    stores_are(folder, "AWS")
    (folder / "storage").write_text("No existing storage.")
    return folder


def job_is(folder: Path, status: str | None, log: str = "", **more: object) -> None:
    """What SkyPilot says of the job from now on; None: it does not know it."""
    other = {"job_id": 3, "job_name": "other", "status": "RUNNING", "recovery_count": 0}
    record = {
        "job_id": 7,
        "job_name": "conforming-1a2b3c",
        "status": status,
        "recovery_count": 0,
        "failure_reason": None,
        "details": None,
    }
    (folder / "queue").write_text(json.dumps([other] if status is None else [other, record | more]))
    (folder / "log").write_text(log)


def stores_are(folder: Path, *clouds: str) -> None:
    """In which clouds SkyPilot may make buckets from now on; it has machines of Lambda, too."""
    enabled = {cloud: ["compute", "storage"] for cloud in clouds} | {"Lambda": ["compute"]}
    (folder / "check").write_text(json.dumps({"default": enabled}, indent=2))
