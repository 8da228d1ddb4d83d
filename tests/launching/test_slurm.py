"""The Slurm launcher with commands of the tests in place of Slurm's; `tests/places` has a real cluster."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest

from stoker.errors import BadSetting, NoDevice, PlaceFailed, PlaceUnreachable
from stoker.launching import slurm
from stoker.launching.at_place import HostState
from stoker.launching.bundle import Bundle, TreeFile
from stoker.launching.launcher import Request, Submission
from stoker.launching.lines import LocalLine
from stoker.launching.slurm import LAUNCHER, Shape, meeting_port, progress_text, state_of
from stoker.launching.slurm_scheduler import SlurmJob, read_partitions
from stoker.testing import LauncherConformance
from tests.launching.test_slurm_scheduler import DETAILS, JOB, SINFO

PARTITIONS = read_partitions(SINFO, DETAILS)
_NOW = 1_795_646_800.0
"""Five seconds after the start of the job in `JOB`."""


class FakeSlurm:
    """Commands in a folder at the head of PATH: each notes its arguments and prints what the test set."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.log = folder, folder / "calls"
        folder.mkdir()
        self.says("sinfo", SINFO)
        self.says("scontrol", DETAILS)
        for name in ("squeue", "scancel", "sbatch", "srun", "sacct"):
            self.says(name)

    def says(self, command: str, output: str = "", code: int = 0, error: str = "") -> None:
        """What a command prints, and its exit code."""
        (self.folder / f"{command}.out").write_text(output and f"{output.rstrip()}\n")
        (self.folder / f"{command}.err").write_text(error and f"{error}\n")
        path = self.folder / command
        path.write_text(
            f'#!/bin/sh\necho "{command} $*" >> "{self.log}"\ncat "$0.out"; cat "$0.err" >&2\nexit {code}\n'
        )
        path.chmod(0o755)

    def needs_no_token(self, command: str) -> None:
        """A command that fails with a token of the login node, as one of a job that is over does."""
        path = self.folder / command
        path.write_text(path.read_text().replace("#!/bin/sh\n", '#!/bin/sh\n[ -z "$SLURM_JWT" ] || exit 1\n'))

    @property
    def calls(self) -> list[str]:
        """All calls so far."""
        return self.log.read_text().splitlines() if self.log.exists() else []


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    """Slurm's commands, found before all others."""
    commands = FakeSlurm(tmp_path / "bin")
    monkeypatch.setenv("PATH", f"{commands.folder}:{os.environ['PATH']}")
    return commands


def submission(tmp_path: Path, on: str = "low/2x2xcpu", **more: Any) -> Submission:
    """A submission of one small file."""
    files = (TreeFile.of_bytes("job.py", b"def job(): ...\n"),)
    bundle = Bundle(kind="code", name="job.py", files=files)
    given: dict[str, Any] = {
        "run": "digits-1",
        "target": LAUNCHER.parse(on),
        "code": bundle,
        "job_file": "job.py",
        "owner": "me@here:/runs/1",
        "stoker": dataclasses.replace(bundle, kind="stoker"),
        "environment": "python3",
        "options": {"root": str(tmp_path / "root")},
    }
    return Submission(**(given | more))


def handle_in(tmp_path: Path, **more: Any) -> dict[str, Any]:
    """The handle of a run below `tmp_path`."""
    directory = tmp_path / "root" / "runs" / "digits-1"
    (directory / "launch").mkdir(parents=True, exist_ok=True)
    return {
        "host": "",
        "job": "3",
        "directory": str(directory),
        "root": str(tmp_path / "root"),
        "run": "digits-1",
        "submitted_at": "2026-11-25T22:46:00.000+00:00",
        "owner": "me@here:/runs/1",
        **more,
    }


class TestConformance(LauncherConformance):
    """What every launcher has to do."""

    launcher = LAUNCHER
    words: ClassVar = {"": (1, 1, ""), "low/2x2xcpu": (2, 2, "cpu"), "me@login:gpu/4xa100:qos=high": (1, 4, "a100")}
    bad_words = ("gpu/0xa100", "g u", "gpu/a100:colour=red")
    environments: ClassVar = [
        {"SLURM_JOB_ID": "7", "SLURM_NODEID": str(node), "SLURM_STEP_NUM_NODES": "2", "STOKER_MASTER": "n1"}
        for node in range(2)
    ]
    unreachable: ClassVar = {
        "host": "nobody@127.0.0.1:1",
        "job": "7",
        "directory": "/nowhere",
        "root": "/nowhere",
        "run": "x",
        "submitted_at": "",
    }


@pytest.mark.parametrize(
    ("word", "address", "nodes", "each", "device", "options"),
    [
        ("", ":", 1, 1, "", set()),
        ("gpu", ":gpu", 1, 1, "", set()),
        ("gpu/a100", ":gpu", 1, 1, "a100", set()),
        ("gpu/4xA100", ":gpu", 1, 4, "a100", set()),
        ("gpu/2x4xa100-80g", ":gpu", 2, 4, "a100-80g", set()),
        ("/2x2xcpu", ":", 2, 2, "cpu", set()),
        ("me@login:gpu/4xa100", "me@login:gpu", 1, 4, "a100", set()),
        ("me@login", "me@login:", 1, 1, "", set()),
        ("me@login:2222:gpu", "me@login:2222:gpu", 1, 1, "", set()),
        ("gpu/a100:qos=high,account=ml", ":gpu", 1, 1, "a100", {"qos=high", "account=ml"}),
    ],
)
def test_words_name_login_node_partition_and_shape(
    word: str, address: str, nodes: int, each: int, device: str, options: set[str]
) -> None:
    """Everything but `slurm:` may be left out."""
    target = LAUNCHER.parse(word)
    assert (target.address, target.num_nodes, target.devices_each, target.device) == (address, nodes, each, device)
    assert target.options == options


@pytest.mark.parametrize("word", ["gpu/0xa100", "gpu/1x2x3xa100", "g u", "gpu/a100:colour=red", "a b@c:gpu"])
def test_words_that_cannot_be_read_are_refused(word: str) -> None:
    """With the form that is wanted, or the nearest option."""
    with pytest.raises(NoDevice) as refused:
        LAUNCHER.parse(word)
    assert refused.value.remedy


def test_options_cannot_bring_lines_into_the_script(tmp_path: Path) -> None:
    """Values stand in `#SBATCH` lines: one with a line break, a blank or a quote is refused, as is a name like that."""
    for value in ("a\n#SBATCH --uid=0", "a b", 'a"b', "$(id)"):
        with pytest.raises(BadSetting):
            LAUNCHER.script(submission(tmp_path, options={"account": value}))
    with pytest.raises(PlaceFailed, match="characters"):
        LAUNCHER.start(submission(tmp_path, run="a b"), lambda text: None)


def test_a_shape_takes_the_whole_cpu_or_a_share_by_gpus() -> None:
    """A CPU is all cores of a node; a GPU brings its part of them; `cpus` asks for another number."""
    low = PARTITIONS["low"]
    assert Shape.of(LAUNCHER.parse("low/2x2xcpu"), low, {}).cpus == 64
    shape = Shape.of(LAUNCHER.parse("low/2xh100"), low, {})
    assert (shape.gres, shape.cpus) == ("gpu:nvidia_h100_80gb_hbm3:2", 16)
    assert Shape.of(LAUNCHER.parse("low/a100"), low, {"cpus": "3"}).cpus == 3
    assert Shape.of(LAUNCHER.parse("low/2xgpu"), low, {}).gres == "gpu:2"
    assert Shape.of(LAUNCHER.parse("old"), PARTITIONS["old"], {}).device == "cpu"


def test_time_is_the_forecast_or_the_partition_s_limit_in_slices() -> None:
    """A run longer than the partition allows is asked for its limit, and the number of starts is said."""
    low, target = PARTITIONS["low"], LAUNCHER.parse("low/cpu")
    assert "--time=02:00:00" in Shape.of(target, low, {}, 7200.0).flags()
    long = Shape.of(target, low, {}, 3 * 86400.0)
    assert (long.time_s, long.slices) == (86400.0, 4)
    assert not any(flag.startswith("--time") for flag in Shape.of(target, low, {}).flags())
    assert "--time=00:30:00" in Shape.of(target, low, {"time": "30"}, 7200.0).flags()


def test_the_notice_is_long_enough_for_a_save_and_short_of_the_limit() -> None:
    """Twice a save and half a minute, at least a minute, at most half of the limit: else nothing would be trained."""
    low, target = PARTITIONS["low"], LAUNCHER.parse("low/cpu")
    assert Shape.of(target, low, {}, 7200.0, 300.0).notice_s == 630
    assert Shape.of(target, low, {}, 7200.0, 1.0).notice_s == 60
    assert Shape.of(target, low, {"time": "1"}, None, 30.0).notice_s == 30


def run_batch(
    tmp_path: Path, fake: FakeSlurm, code: int, *, is_stopped: bool = False
) -> tuple[subprocess.CompletedProcess[str], Path]:
    """Run the batch script as Slurm would, with a step that ends with `code`; its end, and the file of secrets."""
    text = LAUNCHER.script(submission(tmp_path, environment="true"))
    handle = handle_in(tmp_path)
    secret = tmp_path / "root" / "secrets" / "digits-1.json"
    secret.parent.mkdir(parents=True, exist_ok=True)
    secret.write_text("{}")
    fake.says("srun", code=code)
    if is_stopped:  # while the step runs
        stop = Path(handle["directory"], "launch", "stop")
        (fake.folder / "srun").write_text(f'#!/bin/sh\n: > "{stop}"\nexit {code}\n')
    fake.says("scontrol", "NodeAddr=10.0.0.1\n")
    fake.says("sleep", code=0)
    # Slurm ends the shell soon after a requeue: here the sleep behind it does.
    (fake.folder / "sleep").write_text('#!/bin/sh\n[ "$1" = 300 ] && kill -TERM $PPID\nexit 0\n')
    environment = {**os.environ, "SLURM_JOB_ID": "3", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JWT": "of the login node"}
    fake.needs_no_token("scontrol")
    done = subprocess.run(
        ["bash", "-c", text], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    return done, secret


@pytest.mark.parametrize(
    ("code", "is_stopped", "is_requeued"),
    [
        (0, False, False),
        (4, False, False),
        (2, False, False),
        (75, False, True),
        (130, False, True),
        (143, False, True),
        (130, True, False),
        (75, True, False),
        (124, False, False),
    ],
)
def test_the_batch_shell_requeues_what_saved_and_keeps_other_exit_codes(
    tmp_path: Path, fake: FakeSlurm, code: int, is_stopped: bool, is_requeued: bool
) -> None:
    """After 75 and 130 it requeues unless the user stopped the run; secrets stay only for another start."""
    done, secret = run_batch(tmp_path, fake, code, is_stopped=is_stopped)
    assert ("scontrol requeue 3" in fake.calls) == is_requeued
    assert secret.exists() == is_requeued
    if not is_requeued:
        assert done.returncode == code, done.stderr


def test_a_start_after_a_stop_trains_nothing(tmp_path: Path, fake: FakeSlurm) -> None:
    """The user stopped the run while a requeued job was on its way to its nodes."""
    Path(handle_in(tmp_path)["directory"], "launch", "stop").touch()
    done, secret = run_batch(tmp_path, fake, 0)
    assert done.returncode == 130
    assert not secret.exists()
    assert not any(call.startswith("srun") for call in fake.calls)


def test_the_script_can_be_read_and_has_what_people_look_for(tmp_path: Path) -> None:
    """Shape, limit, notice, requeue and where output goes stand at its head; secrets are in a file it names."""
    text = LAUNCHER.script(submission(tmp_path, on="gpu/2x4xa100:qos=high", time_limit_s=7200.0, secrets=("API_NAME",)))
    directory = f"{tmp_path}/root/runs/digits-1"
    for line in (
        "#SBATCH --job-name=digits-1",
        "#SBATCH --partition=gpu",
        "#SBATCH --nodes=2",
        "#SBATCH --ntasks-per-node=1",
        "#SBATCH --gres=gpu:a100:4",
        "#SBATCH --time=02:00:00",
        "#SBATCH --qos=high",
        "#SBATCH --requeue",
        "#SBATCH --open-mode=append",
        "#SBATCH --signal=TERM@90",
        f"#SBATCH --output={directory}/launch/slurm-%j.log",
    ):
        assert line in text.splitlines()
    assert "API_NAME" not in text


def test_a_setting_of_two_lines_stays_a_comment(tmp_path: Path) -> None:
    """No line of it is a command, nor one for sbatch; sbatch reads its options up to the first command."""
    text = LAUNCHER.script(submission(tmp_path, arguments=("--set", "prompt=a\n#SBATCH --nodes=9\nrm -rf x")))
    head = text[: text.index("\n\n")].splitlines()
    assert all(line.startswith("#") for line in head)
    assert "#SBATCH --nodes=2" in head
    assert "#SBATCH --nodes=9" not in head


def host_state(phase: Any, at: str, **more: Any) -> HostState:
    """What host 0 wrote."""
    return HostState(
        host=0,
        hostname="n1",
        pid=1,
        began=1,
        boot="",
        phase=phase,
        why=f"is {phase}",
        at=at,
        submitted_at="2026-11-25T22:46:00.000+00:00",
        **more,
    )


def running(**more: Any) -> SlurmJob:
    """A job that runs since 22:46:35."""
    return SlurmJob(**({"state": "RUNNING", "starts_at": _NOW - 5, "nodes": "n1", "line": "JobState=RUNNING"} | more))


@pytest.mark.parametrize(
    ("job", "hosts", "is_stopped", "phase", "why"),
    [
        (running(), [], False, "starting", "on n1"),
        (running(), [host_state("running", "2026-11-25T22:46:39+00:00")], False, "running", "is running"),
        # What a start before this one wrote says nothing of this one; a clock that is behind does not make it one.
        (running(restarts=1), [host_state("running", "2026-11-25T22:46:20+00:00")], False, "starting", "on n1"),
        (running(), [host_state("running", "2026-11-25T22:46:20+00:00")], False, "running", "is running"),
        (running(), [host_state("running", "2026-11-25T22:46:39+00:00")], True, "saving", "asked to save"),
        (running(preempted_at="now"), [host_state("running", "2026-11-25T22:46:39+00:00")], False, "preempted", "node"),
        (
            running(state="FAILED", exit_code=4),
            [host_state("failed", "2026-11-25T22:46:39+00:00", evidence="boom")],
            False,
            "failed",
            "is failed",
        ),
        (running(state="FAILED", exit_code=130), [], True, "stopped", "saved and left, as asked"),
        (
            running(state="FAILED", exit_code=130),
            [host_state("stopped", "2026-11-25T22:46:39+00:00", exit_code=124)],
            True,
            "stopped",
            "is stopped",
        ),  # its limit is over: the mark that stops the other hosts is not the user's
        (
            running(state="FAILED", exit_code=124),
            [host_state("stopped", "2026-11-25T22:46:39+00:00", exit_code=124)],
            False,
            "stopped",
            "is stopped",
        ),
        (running(state="COMPLETED"), [], False, "finished", "trained"),
        (None, [host_state("finished", "2026-11-25T22:46:39+00:00", exit_code=0)], False, "finished", "is finished"),
        (None, [host_state("running", "2026-11-25T22:46:39+00:00")], False, "unknown", "sign of life"),
        (None, [host_state("running", "2026-11-25T20:00:00+00:00")], False, "lost", "does not know"),
        (None, [], False, "lost", "does not know"),
    ],
)
def test_the_scheduler_and_the_hosts_make_one_state(
    job: SlurmJob | None, hosts: list[HostState], is_stopped: bool, phase: str, why: str
) -> None:
    """The scheduler says whether the job is there; its hosts say what it does, if they wrote in this start."""
    state = state_of(job, hosts, is_stopped=is_stopped, now=_NOW)
    assert state.phase == phase
    assert why in state.why


def test_a_host_that_failed_is_the_reason_and_not_one_that_left_for_another_start() -> None:
    """Ranks of the other hosts are lost with those of the one that failed; its error is what there is to read."""
    others = host_state("requeued", "2026-11-25T22:46:40+00:00", exit_code=75)
    failed = dataclasses.replace(host_state("failed", "2026-11-25T22:46:39+00:00", evidence="no setting lrr"), host=1)
    state = state_of(running(state="FAILED", exit_code=75), [others, failed], is_stopped=False, now=_NOW)
    assert (state.phase, state.why) == ("failed", "is failed")
    assert "no setting lrr" in state.evidence
    assert state.at == "2026-11-25T22:46:40+00:00", "the devices were given back then, whenever it is asked"


def test_a_queued_job_says_when_it_is_estimated_to_start() -> None:
    """The scheduler's estimate, as time from now; a running job has none."""
    state = state_of(SlurmJob(state="PENDING", reason="Resources", starts_at=_NOW + 90), [], is_stopped=False, now=_NOW)
    assert state.starts_in_s == 90
    assert state.began_s is None
    begun = state_of(running(), [], is_stopped=False, now=_NOW)
    assert (begun.starts_in_s, begun.began_s) == (None, _NOW - 5)


def test_25_time_outs_of_the_scheduler_are_unknown_and_nothing_acts(
    tmp_path: Path, fake: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A controller that does not answer, or a line that is cut: no command but the question is run."""
    handle = handle_in(tmp_path)
    fake.says("scontrol", error="slurm_load_jobs error: Socket timed out on send/recv operation", code=1)
    for _ in range(25):
        state = LAUNCHER.state(handle)
        assert (state.phase, state.restarts) == ("unknown", 0)
        assert "does not answer" in state.evidence
    assert fake.calls == ["scontrol show job 3 -o"] * 25

    class CutLine(LocalLine):
        def run(self, *_: Any, **__: Any) -> Any:
            raise PlaceUnreachable("login1 gave no answer to `sh` in 30 s")

    monkeypatch.setattr(slurm, "line_to", lambda host: CutLine())
    assert LAUNCHER.state(handle).phase == "unknown"


def test_a_job_that_slurm_forgot_is_looked_up_in_accounting(tmp_path: Path, fake: FakeSlurm) -> None:
    """After MinJobAge scontrol knows no job; sacct may be missing, and then the run's own word counts."""
    handle = handle_in(tmp_path)
    fake.says("scontrol", error="slurm_load_jobs error: Invalid job id specified", code=1)
    fake.says("sacct", "COMPLETED|0:0|3\n")
    assert LAUNCHER.state(handle).phase == "finished"
    fake.says("sacct", error="Slurm accounting storage is disabled", code=1)
    assert LAUNCHER.state(handle).phase == "lost"


def test_the_end_of_a_run_takes_its_secrets_along(tmp_path: Path, fake: FakeSlurm) -> None:
    """A run that scancel ended could not remove them itself."""
    handle = handle_in(tmp_path)
    secret = tmp_path / "root" / "secrets" / "digits-1.json"
    secret.parent.mkdir(parents=True)
    secret.write_text("{}")
    shown = JOB.format(state="RUNNING", reason="None", restarts=0, exit="0:0", preempted="None")
    fake.says("scontrol", shown)
    assert LAUNCHER.state(handle).phase == "starting"
    assert secret.exists()
    fake.says("scontrol", shown.replace("RUNNING", "CANCELLED"))
    assert LAUNCHER.state(handle).phase == "stopped"
    assert not secret.exists()


def test_a_job_that_fails_on_a_full_disk_says_so(tmp_path: Path, fake: FakeSlurm) -> None:
    """Its hosts can write no state and no log there: the scheduler has an exit code alone."""
    handle = handle_in(tmp_path)
    shown = JOB.format(state="FAILED", reason="NonZeroExitCode", restarts=0, exit="120:0", preempted="None")
    fake.says("scontrol", shown)
    assert "free" not in LAUNCHER.state(handle).evidence
    fake.says("df", "Filesystem 1024-blocks Used Available Capacity Mounted on\ntmpfs 14336 14320 16 100% /x")
    state = LAUNCHER.state(handle)
    assert (state.phase, state.exit_code) == ("failed", 120)
    assert state.evidence.endswith(f"; the disk of {handle['directory']} has 16.0 KiB free")


def test_stopping_cancels_what_waits_and_asks_what_runs(tmp_path: Path, fake: FakeSlurm) -> None:
    """The mark comes first, so that nothing is requeued; a job that is gone already is no error."""
    handle = handle_in(tmp_path)
    LAUNCHER.stop(handle)
    assert Path(handle["directory"], "launch", "stop").exists()
    assert fake.calls[:3] == ["scancel --state=PENDING 3", "scancel --state=SUSPENDED 3", "scancel --signal=TERM 3"]
    fake.says("scancel", error="scancel: error: Kill job error on job id 3: Invalid job id specified", code=1)
    LAUNCHER.stop(handle)
    fake.says("scancel", error="scancel: error: Unable to contact slurm controller (connect failure)", code=1)
    with pytest.raises(PlaceUnreachable):
        LAUNCHER.stop(handle)


def test_stopping_again_after_two_minutes_cancels(tmp_path: Path, fake: FakeSlurm) -> None:
    """A run that does not leave by itself is ended by the second request."""
    handle = handle_in(tmp_path)
    mark = Path(handle["directory"], "launch", "stop")
    mark.touch()
    old = mark.stat().st_mtime - 600
    os.utime(mark, (old, old))
    LAUNCHER.stop(handle)
    assert fake.calls[0] == "scancel 3"


def test_a_job_of_that_name_is_found_again_or_refused(tmp_path: Path, fake: FakeSlurm) -> None:
    """The same run is not submitted twice; another one of that name in the queue is named."""
    handle = handle_in(tmp_path)
    fake.says("squeue", f"3|PENDING|{handle['directory']}\n")
    kept = Path(handle["directory"], "launch", "handle.json")
    kept.write_text(json.dumps(handle))
    assert LAUNCHER.start(submission(tmp_path), lambda text: None) == handle
    kept.write_text(json.dumps({**handle, "owner": "you@there:/runs/1"}))
    with pytest.raises(PlaceFailed, match=r"a job named digits-1 is in the queue .*: job 3, PENDING"):
        LAUNCHER.start(submission(tmp_path), lambda text: None)
    assert not any(call.startswith("sbatch") for call in fake.calls)


def test_a_job_whose_number_was_lost_is_found_by_its_directory(tmp_path: Path, fake: FakeSlurm) -> None:
    """The line was cut between sbatch and its answer: the same command finds the job, and does not submit another."""
    handle = handle_in(tmp_path)
    del handle["job"]
    Path(handle["directory"], "launch", "handle.json").write_text(json.dumps(handle))
    fake.says("squeue", f"41|RUNNING|{handle['directory']}\n")
    assert LAUNCHER.start(submission(tmp_path), lambda text: None) == {**handle, "job": "41"}


@pytest.fixture
def shipping(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Environments are there: what is tested is what comes after."""
    monkeypatch.setattr("stoker.launching.shipment._their_python", lambda *_: "/usr/bin/python3")
    return lambda: None


@pytest.mark.usefixtures("shipping")
def test_a_refused_submission_leaves_nothing_of_the_run(
    tmp_path: Path, fake: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No directory, no order, no secret; code is kept by its digest."""
    monkeypatch.setenv("API_NAME", "hidden")
    said = "sbatch: error: Batch job submission failed: Invalid account or account/partition combination specified"
    fake.says("sbatch", error=said, code=1)
    given = {"root": str(tmp_path / "root"), "account": "nosuch"}
    with pytest.raises(PlaceFailed, match="the account nosuch may not use partition low"):
        LAUNCHER.start(submission(tmp_path, secrets=("API_NAME",), options=given), lambda text: None)
    left = [path for path in (tmp_path / "root").rglob("*") if path.is_file() and path.name != "job.py"]
    assert left == []
    assert not (tmp_path / "root" / "runs" / "digits-1").exists()


@pytest.mark.usefixtures("shipping")
def test_secrets_travel_in_a_file_of_this_user_alone(
    tmp_path: Path, fake: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not in the script, the handle or the order, nor in the environment of sbatch, which Slurm stores."""
    monkeypatch.setenv("API_NAME", "hidden-value")
    monkeypatch.setenv("API_OF_THE_SHELL", "not sent")
    monkeypatch.setenv("SBATCH_ACCOUNT", "ml")
    monkeypatch.setenv("SBATCH_CONSTRAINT", "a100 & ib")
    monkeypatch.setenv("SLURM_JWT", "eyJ0")
    monkeypatch.setenv("SLURM_JOB_ID", "of another job")
    monkeypatch.delenv("SLURM_CONF", raising=False)
    fake.says("sbatch", "3\n")
    (fake.folder / "sbatch").write_text(f'#!/bin/sh\nenv > "{tmp_path}/environment"\necho 3\n')
    handle = LAUNCHER.start(submission(tmp_path, secrets=("API_NAME",)), lambda text: None)
    assert handle["job"] == "3"
    secret = tmp_path / "root" / "secrets" / "digits-1.json"
    assert secret.stat().st_mode & 0o777 == 0o600
    assert json.loads(secret.read_text())["API_NAME"] == "hidden-value"
    others = [path for path in (tmp_path / "root").rglob("*") if path.is_file() and path != secret]
    assert not [path for path in others if "hidden-value" in path.read_text()]
    given = dict(line.split("=", 1) for line in (tmp_path / "environment").read_text().splitlines())
    assert not {"API_NAME", "API_OF_THE_SHELL", "SLURM_JOB_ID", "SLURM_CONF"} & given.keys()
    assert (given["HOME"], given["SBATCH_ACCOUNT"]) == (os.environ["HOME"], "ml")
    assert (given["SBATCH_CONSTRAINT"], given["SLURM_JWT"]) == ("a100 & ib", "eyJ0")


@pytest.mark.usefixtures("shipping")
def test_variables_of_the_user_do_not_change_what_the_script_states(
    tmp_path: Path, fake: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For sbatch a variable wins over the script: it sees those alone whose option the script leaves open."""
    for name, value in {
        "ACCOUNT": "other",
        "QOS": "high",
        "MEM_PER_CPU": "1G",
        "PARTITION": "cpu",
        "TIMELIMIT": "5",
        "GRES": "gpu:1",
        "GPUS": "1",
        "SIGNAL": "B:USR1@120",
        "NO_REQUEUE": "1",
        "EXPORT": "NONE",
        "JOB_NAME": "x",
        "ARRAY_INX": "0-3",
        "OPEN_MODE": "truncate",
        "OUTPUT": "x.log",
        "WAIT": "1",
    }.items():
        monkeypatch.setenv(f"SBATCH_{name}", value)
    fake.says("sbatch", "3\n")
    (fake.folder / "sbatch").write_text(f'#!/bin/sh\nenv > "{tmp_path}/environment"\necho 3\n')
    given = {"root": str(tmp_path / "root"), "account": "ml", "mem": "4G"}
    handle = LAUNCHER.start(submission(tmp_path, options=given), lambda text: None)
    seen = [line for line in (tmp_path / "environment").read_text().splitlines() if line.startswith("SBATCH_")]
    assert seen == ["SBATCH_QOS=high"]
    script = Path(handle["directory"], "launch", "batch.sh").read_text()
    assert {"#SBATCH --account=ml", "#SBATCH --mem=4G", "#SBATCH --partition=low"} <= set(script.splitlines())


def test_offers_are_partitions_with_the_scheduler_s_estimate(fake: FakeSlurm) -> None:
    """Partitions that have the shape, the default one first, each with the start that Slurm estimates for this job."""
    fake.says("sbatch", error="sbatch: Job 9 to start at 2030-01-01T00:00:00 using 1 processors on nodes n1")
    offers = LAUNCHER.offers(Request(target=LAUNCHER.parse("/2x2xa100"), time_limit_s=7200.0))
    assert [offer.text for offer in offers] == ["slurm:low/2x2xa100", "slurm:short/2x2xa100"]
    assert offers[0].starts_in_s is not None
    assert offers[0].starts_in_s > 1e6
    assert "short may take its nodes" in offers[0].why
    assert any("--time=02:00:00" in call for call in fake.calls)
    fake.says("sbatch", error="allocation failure: Invalid account or account/partition combination specified", code=1)
    assert LAUNCHER.offers(Request(target=LAUNCHER.parse("low/cpu"))) == ()


def test_the_word_of_an_offer_keeps_its_options_and_names_its_partition(fake: FakeSlurm, tmp_path: Path) -> None:
    """It can be typed as it is shown; what is learned where the word leaves the partition open is of the one taken."""
    fake.says("sbatch", error="sbatch: Job 9 to start at 2030-01-01T00:00:00 using 1 processors on nodes n1")
    offers = LAUNCHER.offers(Request(target=LAUNCHER.parse("/a100:qos=high,account=ml")))
    assert offers[0].text == "slurm:low/a100:account=ml,qos=high"
    assert LAUNCHER.probe(LAUNCHER.parse("/cpu"), {"root": str(tmp_path)}).place == "slurm:low"


def test_ranks_come_from_the_step_and_the_script() -> None:
    """A host is a node of the step; each start of a job meets in another port below the ephemeral ones."""
    environ = {"SLURM_JOB_ID": "77", "SLURM_NODEID": "1", "SLURM_STEP_NUM_NODES": "2", "STOKER_MASTER": "10.0.0.1"}
    first = LAUNCHER.ranks({**environ, "STOKER_ADDRESSES": "10.0.0.1\n10.0.0.2"})
    assert first.addresses == ("10.0.0.1", "10.0.0.2")
    again = LAUNCHER.ranks({**environ, "SLURM_RESTART_COUNT": "1"})
    assert (first.host, first.num_hosts, first.master, again.attempt) == (1, 2, "10.0.0.1", "1")
    assert first.port != again.port
    assert all(1024 < meeting_port(job, 3) < 32768 for job in (1, 10**6, 2**31))
    with pytest.raises(PlaceFailed, match="STOKER_MASTER"):
        LAUNCHER.ranks({name: value for name, value in environ.items() if name != "STOKER_MASTER"})


def test_the_comment_says_how_far_a_run_is(tmp_path: Path) -> None:
    """From the newest whole event `progress`; a torn line is passed over."""
    event = {"kind": "progress", "fields": {"samples": 370, "total_samples": 1000, "loss": 0.125, "eta_s": 40.0}}
    log = json.dumps(event).encode() + b'\n{"kind": "warned", "fields": {}}\n{"kind": "progr'
    (tmp_path / "events.jsonl").write_bytes(log)
    assert progress_text(tmp_path / "events.jsonl") == "37 %, 370 of 1,000 samples, loss 0.125, 40.0 s to go"
    assert progress_text(tmp_path / "none") == ""
