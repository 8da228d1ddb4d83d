"""SkyPilot itself, offline: its schema for our task, and its optimiser against our ranking; `STOKER_SKY` names it."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from stoker.launching import place_offers
from stoker.launching.launcher import Request
from stoker.launching.place_history import NO_LESSONS
from stoker.launching.place_offers import ranked
from stoker.launching.sky import LAUNCHER, STARTING_S
from stoker.planning.model.objectives import Objective, PlanLimits
from tests.launching import test_sky as fakes
from tests.launching.fake_sky import sky
from tests.launching.test_place_offers import candidate

__all__ = ["sky"]
PYTHON = Path(os.environ.get("STOKER_SKY", "build/sky")) / "bin" / "python"
pytestmark = [
    pytest.mark.places,
    pytest.mark.skipif(not PYTHON.exists(), reason="no SkyPilot in build/sky: `make build/sky`"),
]

VMS = {
    "lambda": """InstanceType,AcceleratorName,AcceleratorCount,vCPUs,MemoryGiB,Price,Region,GpuInfo,SpotPrice
gpu_1x_l4,L4,1,8,64,0.80,us-east-1,,
gpu_1x_h100_pcie,H100,1,26,200,2.49,us-west-3,,
gpu_1x_a10,A10,1,30,200,0.75,us-east-1,,
""",
    "runpod": """InstanceType,AcceleratorName,AcceleratorCount,vCPUs,MemoryGiB,Price,Region,GpuInfo,SpotPrice
1x_L4_SECURE,L4,1,8,64,0.43,US,,
1x_A100-80GB_SECURE,A100-80GB,1,8,100,1.64,US,,
""",
}
HOURS = {"l4": 10.0, "h100": 1.5, "a10": 9.0, "a100-80": 3.0}

_SCRIPT = """
import json, sys
hours, minimize = json.loads(sys.argv[1]), sys.argv[2]
import sky
from sky import check, global_user_state
from sky.clouds import cloud as sky_cloud
from sky.optimizer import Optimizer
from sky.utils import common
from stoker_names import device_name
global_user_state.set_allowed_clouds(check._get_workspace_allowed_clouds("default"), "default")
global_user_state.set_enabled_clouds(["RunPod", "Lambda"], sky_cloud.CloudCapability.COMPUTE, "default")
with sky.Dag() as dag:
    task = sky.Task("x", run="true")
    task.set_resources({sky.Resources(accelerators={name: 1}) for name in ("L4", "H100", "A10", "A100-80GB")})
    task.set_time_estimator(lambda r: 3600 * hours[device_name(next(iter(r.accelerators)))] + float(sys.argv[3]))
Optimizer.optimize(dag, minimize=getattr(common.OptimizeTarget, minimize), quiet=True)
best = task.best_resources
print(json.dumps([str(best.cloud).lower(), device_name(next(iter(best.accelerators)))]))
"""


def _in_sky(folder: Path, script: str, *arguments: str) -> str:
    """What a program prints that uses SkyPilot, whose home is `folder`."""
    home = folder / "home"
    for cloud, rows in VMS.items():
        file = home / ".sky/catalogs/v8" / cloud / "vms.csv"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(rows)
    common = home / ".sky/catalogs/v8/common"
    common.mkdir(parents=True, exist_ok=True)
    names = "L4,GCP\nH100,Lambda\nA10,Lambda\nA100-80GB,RunPod\n"
    (common / "accelerators.csv").write_text("AcceleratorName,Clouds\n" + names)
    (folder / "stoker_names.py").write_text(
        "def device_name(name):\n    return {'A100-80GB': 'a100-80'}.get(name, name.lower())\n"
    )
    done = subprocess.run(
        [str(PYTHON.absolute()), "-c", script, *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        env={"HOME": str(home), "PATH": os.environ["PATH"], "PYTHONPATH": str(folder)},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize(("minimize", "objective"), [("COST", "money"), ("TIME", "time")])
def test_its_optimiser_chooses_the_same_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, minimize: str, objective: Objective
) -> None:
    """Given our run times, on the same catalogue; by the price of an hour another one would be first."""
    answer = _in_sky(tmp_path, _SCRIPT, json.dumps(HOURS), minimize, str(STARTING_S))
    monkeypatch.setenv("SKY_RUNTIME_DIR", str(tmp_path / "home"))
    offers = LAUNCHER.offers(Request(target=LAUNCHER.parse("any")))
    priced = [place_offers._priced(offer, candidate(HOURS[offer.device]), NO_LESSONS, 0) for offer in offers]
    best = ranked(priced, PlanLimits(), objective)[0]
    cloud, device = json.loads(answer.splitlines()[-1])
    assert best.text == f"sky:{cloud}/1x{device}"
    assert best.price_rank is not None
    assert best.price_rank > 1


def test_our_task_is_one_of_its_tasks(sky: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its schema takes every field; the first machine, with its recovery, and the bucket are read as they are meant."""
    LAUNCHER.start(fakes.TestConformance().submission("any/l4", arguments=fakes.KEEP, secrets=()), lambda text: None)
    task = json.loads((sky / "task.json").read_text())
    script = (
        "import json, sys, sky\nfrom sky.utils import common_utils, schemas\n"
        "task = json.loads(sys.argv[1])\n"
        "common_utils.validate_schema(task, schemas.get_task_schema(), 'task: ')\n"
        "common_utils.validate_schema(task['resources'], schemas.get_resources_schema(), 'resources: ')\n"
        "machine, = sky.Resources.from_yaml_config(task['resources']['ordered'][0])\n"
        "print(json.dumps([str(machine.cloud), machine.region, machine.instance_type, machine.job_recovery]))\n"
    )
    cloud, region, instance, recovery = json.loads(_in_sky(tmp_path, script, json.dumps(task)).splitlines()[-1])
    assert (cloud.lower(), region, instance) == ("lambda", "us-east-1", "gpu_1x_l4")
    assert recovery["recover_on_exit_codes"] == [75, 130]
    kept = tmp_path / "packages"
    kept.mkdir()
    (kept / "s3fs.py").touch()
    monkeypatch.syspath_prepend(kept)
    handle = LAUNCHER.start(fakes.TestConformance().submission("any/l4", secrets=()), lambda text: None)
    with_bucket = json.loads((sky / "task.json").read_text())
    script_of_bucket = (
        "import json, sys\nfrom sky.data import storage\nfrom sky.utils import common_utils, schemas\n"
        "task = json.loads(sys.argv[1])\n"
        "common_utils.validate_schema(task, schemas.get_task_schema(), 'task: ')\n"
        "(folder, config), = task['file_mounts'].items()\n"
        "common_utils.validate_schema(config, schemas.get_storage_schema(), 'storage: ')\n"
        "storage.S3Store.validate_name(config['name'])\nstorage.GcsStore.validate_name(config['name'])\n"
        "made = storage.Storage.from_yaml_config(config)\n"
        "print(json.dumps([folder, made.name, made.mode.value, made.persistent]))\n"
    )
    mounted = json.loads(_in_sky(tmp_path, script_of_bucket, json.dumps(with_bucket)).splitlines()[-1])
    assert mounted == ["/stoker-runs", handle["keep"].removeprefix("s3://"), "MOUNT", True]
    del task["resources"]["ordered"][0]["instance_type"]
    task["resources"]["ordered"][0]["instance_kind"] = "gpu_1x_l4"
    with pytest.raises(AssertionError, match="instance_kind"):
        _in_sky(tmp_path, script, json.dumps(task))
