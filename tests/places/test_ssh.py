"""Runs over a real sshd: on loopback, and on two machines that are network namespaces of this one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from stoker.errors import PlaceFailed, PlaceUnreachable
from stoker.launching.bundle import TreeFile, stoker_bundle
from stoker.launching.follow import Follower
from stoker.launching.launch import LaunchedRun, launch
from stoker.launching.launch_options import LaunchOptions
from stoker.launching.launcher import Submission
from stoker.launching.lines import SshLine
from stoker.launching.ssh import LAUNCHER
from stoker.records import ENDED, Event, LaunchState, Plan, dumps
from stoker.testing import LiveLauncherConformance
from tests.places.ssh_hosts import SSHD, Host, Hosts, loopback, namespaces

pytestmark = [
    pytest.mark.places,
    pytest.mark.skipif(SSHD is None, reason="there is no sshd: apt-get install openssh-server"),
]
PATIENCE_S = 300.0
ROOT = Path(__file__).parents[2]

JOB = """
import os
import time
import torch
from torch import nn
import stoker

class Slow(torch.utils.data.Dataset):
    def __init__(self, pause_s):
        self.pause_s = pause_s
        draw = torch.Generator().manual_seed(1)
        self.inputs, self.targets = torch.randn(256, 8, generator=draw), torch.randint(0, 3, (256,), generator=draw)
    def __len__(self):
        return 256
    def __getitem__(self, index):
        time.sleep(self.pause_s)
        return self.inputs[index], self.targets[index]
    @property
    def fingerprint(self):
        return "slow"

def job(epochs: float = 2, pause_s: float = 0.0) -> stoker.Job:
    return stoker.Job(model=lambda: nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 3)), data=Slow(pause_s),
                      loss="cross_entropy", optimizer=stoker.SGD(lr=0.05, momentum=0.9), batch=16,
                      until=stoker.epochs(epochs), seed=3)
"""


@pytest.fixture
def job(place: Path) -> Path:
    """A job whose samples can take a stated time."""
    path = place / "slow.py"
    path.write_text(JOB)
    return path


@pytest.fixture
def box(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    """A machine on loopback."""
    with loopback(tmp_path_factory.mktemp("hosts")) as hosts:
        monkeypatch.setenv("STOKER_SSH_CONFIG", str(hosts.config))
        yield hosts.hosts[0]


@pytest.fixture
def machines(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hosts]:
    """Two machines with networks of their own."""
    if os.getuid() != 0 or subprocess.run(["ip", "netns", "list"], capture_output=True, check=False).returncode != 0:
        pytest.skip("network namespaces need root and ip netns")
    folder = tmp_path_factory.mktemp("hosts")
    try:
        with namespaces(folder) as hosts:
            monkeypatch.setenv("STOKER_SSH_CONFIG", str(hosts.config))
            yield hosts
    except subprocess.CalledProcessError as problem:
        pytest.skip(f"this system allows no network namespaces: {problem}")


def _options(root: Path, **more: Any) -> LaunchOptions:
    settings: dict[str, Any] = {
        "env": sys.executable,
        "place": {"root": str(root)},
        "arguments": ("--threads", "1", "--checkpoint-every", "1"),
        "variables": {"OMP_NUM_THREADS": "1", "STOKER_CACHE": str(root / "cache")},
    }
    return LaunchOptions(**settings | more)


def _until(condition: Callable[[], Any], what: str) -> Any:
    """What `condition` gives once it is true."""
    end = time.monotonic() + PATIENCE_S
    while not (result := condition()):
        assert time.monotonic() < end, f"waited {PATIENCE_S:g} s for {what}"
        time.sleep(0.2)
    return result


def _ended(handle: dict[str, Any]) -> LaunchState:
    state: LaunchState = _until(lambda: (s := LAUNCHER.state(handle)).phase in ENDED and s, "the end")
    return state


def _samples(handle: dict[str, Any]) -> int:
    return max((event["fields"].get("samples", 0) for event in _events(handle)), default=0)


def _events(handle: dict[str, Any]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in LAUNCHER.events(handle, 0).splitlines()]


def _saved(handle: dict[str, Any]) -> bool:
    return b'"checkpointed"' in LAUNCHER.events(handle, 0)


class TestLive(LiveLauncherConformance):
    launcher = LAUNCHER

    @contextmanager
    def place(self, folder: Path) -> Iterator[Submission]:
        """A machine on loopback, and a job of about a minute."""
        hosts = folder / "hosts"
        hosts.mkdir()
        with loopback(hosts) as machines, pytest.MonkeyPatch.context() as patch:
            patch.setenv("STOKER_SSH_CONFIG", str(machines.config))
            file = TreeFile.of_bytes("slow.py", JOB.encode())
            yield Submission(
                run="slow-1a2b3c",
                target=LAUNCHER.parse("box"),
                stoker=stoker_bundle(),
                job_file="slow.py",
                code=stoker_bundle().__class__(kind="code", name="slow.py", files=(file,)),
                arguments=("--set", "pause_s=0.01", "--set", "epochs=20", "--threads", "1"),
                environment=sys.executable,
                variables={"STOKER_CACHE": str(folder / "cache")},
                options={"root": str(machines.hosts[0].folder)},
            )

    def until(self, handle: dict[str, Any], *phases: str) -> Iterator[LaunchState]:
        """States, twice a second."""
        end = time.monotonic() + PATIENCE_S
        while time.monotonic() < end:
            state = LAUNCHER.state(handle)
            yield state
            if state.phase in phases:
                return
            time.sleep(0.5)
        raise AssertionError(f"no phase of {phases} within {PATIENCE_S:g} s")


def test_a_run_there_is_a_run_as_here(job: Path, box: Host) -> None:
    """Trained over ssh, fetched, and equal bit for bit to the same run here; a second launch sends nothing."""
    there = launch(job, on="ssh:box", options=_options(box.folder))
    assert there.launch.sent_bytes > 1 << 20
    assert _ended(there.launch.handle).phase == "finished"
    LAUNCHER.fetch(there.launch.handle, there.directory.path)
    here = [sys.executable, "-m", "stoker", "train", "slow.py", "--threads", "1", "--run-dir", "here", "--json"]
    environ = os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    subprocess.run(here, check=True, capture_output=True, env=environ)
    ours, theirs = (load_file(path / "model.safetensors") for path in (Path("here"), there.directory.path))
    assert ours.keys() == theirs.keys()
    assert all(ours[name].equal(theirs[name]) for name in ours)
    again = launch(job, on="ssh:box", options=_options(box.folder))
    assert again.is_new
    assert again.launch.sent_bytes == 0
    assert _ended(again.launch.handle).phase == "finished"


def test_a_killed_rank_goes_on_from_its_checkpoint(job: Path, box: Host) -> None:
    """SIGKILL of the training process: its supervisor starts it again, and the result is that of an unbroken run."""
    settings = {"epochs": 6, "pause_s": 0.01}
    Path("plan.json").write_text(dumps(Plan(device="cpu", micro_batch=16, threads=1)))
    options = _options(box.folder, plan=Path("plan.json"))  # else each run chooses one in its first updates
    broken = launch(job, on="ssh:box", settings=settings, options=options)
    _until(lambda: _saved(broken.launch.handle), "a checkpoint")
    directory = broken.launch.handle["directory"]
    found = subprocess.run(["pgrep", "-f", f"stoker train .*{directory}"], capture_output=True, text=True, check=True)
    for pid in found.stdout.split():
        os.kill(int(pid), 9)
    state = _ended(broken.launch.handle)
    assert (state.phase, state.restarts) == ("finished", 1), state
    whole = launch(job, on="ssh:box", settings=settings, options=replace(options, new=True))
    assert _ended(whole.launch.handle).phase == "finished"
    ours, theirs = (load_file(Path(one.launch.handle["directory"]) / "model.safetensors") for one in (broken, whole))
    assert all(ours[name].equal(theirs[name]) for name in ours)


def test_a_secret_is_nowhere_but_in_the_job(job: Path, box: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not in any file here or there, not in a command line; the job has it."""
    monkeypatch.setenv("HUB_TOKEN", "open-sesame-open-sesame")
    job.write_text(JOB + "\nassert os.environ['HUB_TOKEN'].startswith('open')\n")
    secret = launch(job, on="ssh:box", options=_options(box.folder, secrets=("HUB_TOKEN",)))
    lines = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    assert _ended(secret.launch.handle).phase == "finished"
    assert "sesame-open-sesame" not in lines
    LAUNCHER.fetch(secret.launch.handle, secret.directory.path)
    for root in (box.folder, Path("runs")):
        files = [path for path in root.rglob("*") if path.is_file()]
        assert files
        assert [path for path in files if b"sesame-open-sesame" in path.read_bytes()] == []


def test_a_job_that_fails_there_says_why(job: Path, box: Host) -> None:
    """The error's own line is the evidence, and nothing is started again."""
    job.write_text(JOB.replace("return stoker.Job(", "os.environ['ONLY_HERE']\n    return stoker.Job("))
    os.environ["ONLY_HERE"] = "1"
    try:
        failed = launch(job, on="ssh:box", options=_options(box.folder))
    finally:
        del os.environ["ONLY_HERE"]
    state = _ended(failed.launch.handle)
    assert (state.phase, state.exit_code, state.restarts) == ("failed", 2, 0)
    assert "KeyError" in state.evidence


def test_a_full_disk_is_said_and_leaves_nothing(job: Path, box: Host, tmp_path: Path) -> None:
    """Too small for what is sent: refused with the numbers. Full while the run saves: said, and it goes on later."""
    if os.getuid() != 0:
        pytest.skip("a small disk needs root to mount it")
    small = tmp_path / "small"
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(small)], check=True)
    try:
        with pytest.raises(PlaceFailed, match=r"have to be sent, and .* has .* free"):
            launch(job, on="ssh:box", options=_options(small))
        assert not Path("runs").exists() or list(Path("runs").iterdir()) == []
        subprocess.run(["mount", "-o", "remount,size=32m", str(small)], check=True)
        options = _options(small, variables={"OMP_NUM_THREADS": "1", "STOKER_CACHE": str(tmp_path / "cache")})
        first = launch(job, on="ssh:box", settings={"epochs": 8, "pause_s": 0.01}, options=options)
        _until(lambda: _saved(first.launch.handle), "a checkpoint")
        with suppress(OSError), (small / "filler").open("wb", buffering=0) as filler:
            while True:
                filler.write(bytes(4096))
        state = _ended(first.launch.handle)
        said = state.evidence + LAUNCHER.events(first.launch.handle, 0).decode()
        assert "No space left" in said or "full" in said, state
        with pytest.raises(PlaceFailed, match=r"cannot be written on box \(.* free\): .*No space left"):
            launch(job, on="ssh:box", settings={"epochs": 8, "pause_s": 0.01}, options=options)
        (small / "filler").unlink(missing_ok=True)
        second = launch(job, on="ssh:box", settings={"epochs": 8, "pause_s": 0.01}, options=options)
        if state.phase == "failed":
            assert second.directory == first.directory
        assert _ended(second.launch.handle).phase == "finished"
    finally:
        subprocess.run(["umount", "-l", str(small)], check=True)


def test_a_cut_line_is_unknown_and_the_stream_goes_on(job: Path, machines: Hosts) -> None:
    """The line is cut for 60 s: nothing is decided by then, and then the log goes on at the byte where it stopped."""
    host = machines.hosts[0]
    run = launch(job, on="ssh:box1", settings={"epochs": 40, "pause_s": 0.01}, options=_options(host.folder))
    handle = run.launch.handle
    _until(lambda: _samples(handle) > 0, "the first samples")
    log = LAUNCHER.events(handle, 0)
    host.cut_line()
    cut_at = time.monotonic()
    phases = []
    while time.monotonic() < cut_at + 60:
        phases.append(LAUNCHER.state(handle).phase)
        with pytest.raises(PlaceUnreachable):
            LAUNCHER.events(handle, len(log))
        time.sleep(1)
    assert set(phases) == {"unknown"}
    with pytest.raises(PlaceUnreachable):
        launch(job, on="ssh:box1", settings={"epochs": 40, "pause_s": 0.01}, options=_options(host.folder))
    host.mend_line()
    _until(lambda: LAUNCHER.state(handle).phase in {"running", *ENDED}, "the line")
    more = LAUNCHER.events(handle, len(log))
    assert (log + more) == LAUNCHER.events(handle, 0)[: len(log) + len(more)]
    assert b'"resumed"' not in log + more, "the run was interrupted by a line that was cut"
    assert _ended(handle).phase == "finished"


def test_a_follower_lives_through_a_cut_line(job: Path, machines: Hosts) -> None:
    """What is shown and kept here is the log there, byte for byte, and the run comes home."""
    host = machines.hosts[0]
    run = launch(job, on="ssh:box1", settings={"epochs": 12, "pause_s": 0.01}, options=_options(host.folder))
    shown: list[Event] = []
    mending: list[subprocess.Popen[bytes]] = []

    def sink(event: Event) -> None:
        shown.append(event)
        if event.kind == "progress" and not mending:
            host.cut_line()
            later = f"sleep 20; exec {' '.join(host.inside('ip', 'link', 'set', 'eth0', 'up'))}"
            mending.append(subprocess.Popen(["sh", "-c", later]))

    followed = Follower(directory=run.directory, launcher=LAUNCHER, sink=sink).run()
    assert followed.state.phase == "finished"
    assert mending[0].wait() == 0
    there = Path(run.launch.handle["directory"])
    assert (run.directory.path / "events.jsonl").read_bytes() == (there / "events.jsonl").read_bytes()
    assert run.directory.read_run().status == "finished"


def test_a_host_that_dies_is_lost_and_the_run_goes_on(job: Path, machines: Hosts) -> None:
    """A power cut: while the host is gone the run is unknown; when it is back, lost; the same command goes on."""
    host = machines.hosts[0]
    settings = {"epochs": 12, "pause_s": 0.01}
    run = launch(job, on="ssh:box1", settings=settings, options=_options(host.folder))
    handle = run.launch.handle
    _until(lambda: _saved(handle), "a checkpoint")
    host.kill()
    assert LAUNCHER.state(handle).phase == "unknown"
    machines.start(host)
    state = LAUNCHER.state(handle)
    assert state.phase == "lost"
    assert "is gone" in state.evidence or "anew" in state.evidence
    again = launch(job, on="ssh:box1", settings=settings, options=_options(host.folder))
    assert again.directory == run.directory
    assert _ended(again.launch.handle).phase == "finished"
    resumed = next(event for event in _events(handle) if event["kind"] == "resumed")
    assert resumed["fields"]["samples"] > 0


def test_two_hosts_are_one_run(job: Path, machines: Hosts, tmp_path: Path) -> None:
    """Two hosts with a process each meet over their own network; one is killed, both start again and finish."""
    shared = tmp_path / "shared"
    shared.mkdir()
    settings = {"epochs": 30, "pause_s": 0.01}
    run = launch(job, on="ssh:box1,box2/cpu", settings=settings, options=_options(shared))
    handle = run.launch.handle
    _until(lambda: _saved(handle), "a checkpoint")
    found = subprocess.run(
        ["ip", "netns", "pids", machines.hosts[1].namespace], capture_output=True, text=True, check=True
    )
    for pid in found.stdout.split():
        command = Path(f"/proc/{pid}/cmdline").read_bytes() if Path(f"/proc/{pid}").exists() else b""
        if b"stoker\0train" in command:
            os.kill(int(pid), 9)
    state = _ended(handle)
    assert state.phase == "finished", state
    assert state.restarts >= 1
    assert len([event for event in _events(handle) if event["kind"] == "started"]) >= 2


def test_hosts_that_share_no_disk_are_refused(job: Path, machines: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second host does not see the first one's runs: said before anything is sent."""
    hidden = machines.hosts[0].folder
    real = SshLine.exists
    monkeypatch.setattr(SshLine, "exists", lambda self, path: self.name != "box2" and real(self, path))
    with pytest.raises(PlaceFailed, match="box2 does not see"):
        launch(job, on="ssh:box1,box2", options=_options(hidden))
    assert not (hidden / "code").exists()


def test_hosts_that_cannot_reach_each_other_are_named(machines: Hosts, tmp_path: Path) -> None:
    """A firewall between them is found before anything is sent: who, whom, on what port, and what to do."""
    target, options = LAUNCHER.parse("box1,box2/cpu"), {"root": str(tmp_path), "port": "29511"}
    probe = LAUNCHER.probe(target, options)
    assert (probe.missing, probe.facts["ports"]) == ((), "each host reaches each other one")
    first, second = machines.hosts
    drop = f"iif eth0 from {second.address} ipproto tcp dport 1024-32000 blackhole"
    for words in ("add pref 100 lookup local", "del pref 0", f"add pref 50 {drop}"):
        subprocess.run(["ip", "-n", first.namespace, "rule", *words.split()], check=True)
    (sentence,) = LAUNCHER.probe(target, options).missing
    assert sentence.startswith(
        f"box2 cannot reach box1 at {first.address} on TCP port 29511 (no answer in 5 s): open ports "
    )
    assert " and 29511, where the ranks meet, of box1 to box2, or name the hosts by addresses of a network" in sentence


def test_submission_to_first_update(job: Path, box: Host) -> None:
    """With everything there already, the first update of a run there comes soon; the time is printed."""
    warm = launch(job, on="ssh:box", options=_options(box.folder))
    _ended(warm.launch.handle)
    began = time.monotonic()
    run: LaunchedRun = launch(job, on="ssh:box", settings={"epochs": 3}, options=_options(box.folder))
    submitted_s = time.monotonic() - began
    _until(lambda: _samples(run.launch.handle) > 0, "the first update")
    print(f"submitted after {submitted_s:.1f} s, first update after {time.monotonic() - began:.1f} s")
    _ended(run.launch.handle)


def test_the_versions_here_are_installed_there_once(job: Path, box: Host) -> None:
    """The default environment: the place's pip makes it from its own index, and the second run finds it."""
    told: list[str] = []
    first = launch(job, on="ssh:box", options=_options(box.folder, env="lock"), tell=told.append)
    assert any("making the environment" in line for line in told)
    assert first.launch.handle["python"].startswith(f"{box.folder}/environments/")
    assert _ended(first.launch.handle).phase == "finished"
    told.clear()
    second = launch(
        job, on="ssh:box", settings={"epochs": 3}, options=_options(box.folder, env="lock"), tell=told.append
    )
    assert not any("making" in line or "sending Stoker" in line for line in told)
    assert second.launch.environment_digest == first.launch.environment_digest
    assert _ended(second.launch.handle).phase == "finished"
