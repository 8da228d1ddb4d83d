from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from stoker.launching import at_place
from stoker.launching.at_place import (
    HostState,
    HostSupervisor,
    LaunchOrder,
    ask_to_stop,
    combined,
    judge,
    noting_full_disk,
    rank_command,
    rank_environments,
    read_host_state,
    read_secrets,
    state_of,
)
from stoker.launching.launcher import HostRanks, utc_now
from stoker.records import Event, dumps

ORDER = LaunchOrder(run="gpt-1a2b3c", kind="ssh", code=".", job_file="gpt.py", submitted_at="2026-11-25T10:00:00+00:00")
KILLED = -signal.SIGKILL


@pytest.mark.parametrize(
    ("codes", "facts", "phase", "code", "again"),
    [
        ([0], {}, "finished", 0, False),
        ([75], {}, "requeued", 75, True),
        ([75], {"is_requeued": True}, "requeued", 75, False),
        ([130], {"is_stopped": True}, "stopped", 130, False),
        ([130], {"is_signalled": True, "is_requeued": True}, "preempted", 130, False),
        ([130], {"is_signalled": True}, "stopped", 130, False),
        ([2], {}, "failed", 2, False),
        ([3], {}, "failed", 3, False),
        ([4], {}, "failed", 4, False),
        ([KILLED], {}, "lost", 4, True),
        ([KILLED], {"is_stopped": True}, "lost", 4, False),
        ([KILLED], {"is_requeued": True}, "requeued", 75, False),
        ([KILLED], {"is_requeued": True, "is_stopped": True}, "lost", 4, False),
        ([4, 4], {"num_hosts": 2, "is_requeued": True}, "requeued", 75, False),
        ([4], {"is_requeued": True}, "failed", 4, False),
        ([2], {"is_stopped": True}, "failed", 2, False),
        ([130, 4], {"is_stopped": True, "num_hosts": 2}, "stopped", 130, False),
        ([-signal.SIGTERM], {"is_stopped": True}, "stopped", 130, False),
        ([4, KILLED], {"num_hosts": 2}, "lost", 4, True),
        ([4, 4], {"num_hosts": 2}, "lost", 4, True),
        ([2, 4], {"num_hosts": 2}, "failed", 2, False),
        ([0, 0], {"num_hosts": 2}, "finished", 0, False),
        ([4, KILLED], {"are_ranks_fixed": True}, "lost", 4, True),
        ([4, 4], {"are_ranks_fixed": True}, "lost", 4, True),
        ([4, 2], {"are_ranks_fixed": True}, "failed", 2, False),
        ([130, 4], {"are_ranks_fixed": True, "is_stopped": True}, "stopped", 130, False),
        ([4], {"are_ranks_fixed": False}, "failed", 4, False),
        *(
            (codes, {"are_ranks_fixed": True, "is_signalled": True, "is_requeued": True}, "requeued", 75, False)
            for codes in ([4, -signal.SIGTERM], [-signal.SIGTERM, 4])
        ),
    ],
)
def test_what_follows_from_exit_codes(
    codes: list[int], facts: dict[str, Any], phase: str, code: int, *, again: bool
) -> None:
    """A slice and lost ranks are started again here, or by a scheduler, which does so after 75 alone."""
    outcome = judge(
        codes,
        is_stopped=facts.get("is_stopped", False),
        is_signalled=facts.get("is_signalled", False),
        order=replace(
            ORDER,
            is_requeued=facts.get("is_requeued", False),
            are_ranks_fixed=facts.get("are_ranks_fixed", False),
            ranks_each=len(codes),
        ),
        num_hosts=facts.get("num_hosts", 1),
    )
    assert (outcome.phase, outcome.exit_code, outcome.is_again) == (phase, code, again)


def test_ranks_of_two_hosts_meet_at_the_first() -> None:
    """Ranks are numbered host after host; variables of a launcher around us do not leak into them."""
    order = replace(ORDER, num_hosts=2, ranks_each=2, variables={"A": "1"}, pythonpath="/stoker")
    base = {"RANK": "9", "WORLD_SIZE": "9", "PATH": "/bin", "STOKER_SECRETS_FILE": "/x"}
    found = rank_environments(order, HostRanks(host=1, num_hosts=2, master="10.0.0.1", port=4711), base, {"S": "s"})
    common = {
        "PATH": "/bin",
        "A": "1",
        "S": "s",
        "STOKER_LAUNCHED": "ssh",
        "PYTHONPATH": "/stoker",
        "WORLD_SIZE": "4",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "4711",
    }
    assert found == [common | {"RANK": "2", "LOCAL_RANK": "0"}, common | {"RANK": "3", "LOCAL_RANK": "1"}]


def test_one_host_starts_its_own_ranks() -> None:
    """Several devices of one host are one process there, which starts the others: `--on 2xcpu`."""
    order = replace(ORDER, ranks_each=2, device="cpu", arguments=("--set", "lr=0.1"))
    assert len(rank_environments(order, HostRanks(), {"RANK": "0"}, {})) == 1
    assert "RANK" not in rank_environments(order, HostRanks(), {"RANK": "0"}, {})[0]
    command = rank_command(order, Path("/runs/x"), 1)
    assert command[3:] == ["train", "gpt.py", "--set", "lr=0.1", "--on", "2xcpu", "--run-dir", "/runs/x", "--json"]
    assert rank_command(replace(order, num_hosts=2), Path("/runs/x"), 2)[7:9] == ["--on", "cpu"]


def test_fixed_ranks_of_one_host_meet_on_the_loopback() -> None:
    """No rank goes on without the others: each is a process of its own, as those of several hosts are."""
    order = replace(ORDER, ranks_each=2, device="cpu", are_ranks_fixed=True)
    found = rank_environments(order, HostRanks(), {"RANK": "0"}, {})
    assert [(one["RANK"], one["LOCAL_RANK"], one["WORLD_SIZE"]) for one in found] == [("0", "0", "2"), ("1", "1", "2")]
    assert {one["MASTER_ADDR"] for one in found} == {"127.0.0.1"}
    [port] = {one["MASTER_PORT"] for one in found}
    assert 1024 <= int(port) < 65536
    command = rank_command(order, Path("/runs/x"), 1)
    assert command[command.index("--on") + 1] == "cpu"
    assert len(rank_environments(replace(order, ranks_each=1), HostRanks(), {}, {})) == 1


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run's directory with an order; its rank is the program `rank.py` in the same folder."""
    directory = tmp_path / "run"
    (directory / "launch").mkdir(parents=True)
    (directory / "launch" / "order.json").write_text(dumps(replace(ORDER, code=str(tmp_path))))
    monkeypatch.setattr(
        at_place, "rank_command", lambda *_: [sys.executable, str(tmp_path / "rank.py"), str(directory)]
    )
    monkeypatch.setattr(HostSupervisor, "_pause", lambda *_: None)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        monkeypatch.setattr(signal, "signal", signal.signal)
        before = signal.getsignal(number)
        monkeypatch.setitem(_BEFORE, number, before)
    yield directory  # type: ignore[misc]
    for number, handler in _BEFORE.items():
        signal.signal(number, handler)


_BEFORE: dict[int, Any] = {}

LOG = """
import os, signal, sys
from pathlib import Path
directory = Path(sys.argv[1])
def progress(samples):
    with (directory / "events.jsonl").open("a") as log:
        log.write('{"kind": "progress", "at": 1.0, "fields": {"samples": %d}}\\n' % samples)
def starts():
    count = directory / "starts"
    count.write_text(count.read_text() + "x" if count.exists() else "x")
    return len(count.read_text())
"""


def _supervised(run: Path, program: str, ranks: HostRanks | None = None) -> tuple[int, HostState]:
    (run.parent / "rank.py").write_text(LOG + program)
    code = HostSupervisor(run, ranks or HostRanks(), {"SECRET": "hunter2"}).run()
    state = read_host_state(run / "launch" / "host-0.json")
    assert state is not None
    return code, state


def test_a_run_that_ends_well_is_finished(run: Path) -> None:
    """Its exit code is the supervisor's, and its state stays for later queries."""
    code, state = _supervised(run, "progress(10)")
    assert code == 0
    assert (state.phase, state.exit_code, state.restarts) == ("finished", 0, 0)
    assert state_of(run).phase == "finished"


def test_a_run_that_has_finished_is_not_started_again(run: Path) -> None:
    """Who started it was killed before it was seen: a second start would train another run, or fail to."""
    (run / "run.json").write_text('{"record": "RunRecord", "status": "finished"}')
    code, state = _supervised(run, "starts(); sys.exit(2)")
    assert code == 0
    assert (state.phase, state.exit_code, state.why) == ("finished", 0, "was trained to its end before this start")
    assert not (run / "starts").exists()
    for content in ('{"status": "running"}', "[]", "torn"):
        (run / "run.json").write_text(content)
        assert _supervised(run, "sys.exit(2)")[1].phase == "failed"


def test_a_killed_rank_is_started_again(run: Path) -> None:
    """As long as it gets on: the count of starts in vain begins over with each sample more."""
    code, state = _supervised(run, "n = starts(); progress(10 * n); n < 6 and os.kill(os.getpid(), signal.SIGKILL)")
    assert code == 0
    assert (state.phase, state.restarts, state.without_progress, state.samples) == ("finished", 5, 0, 60)


def test_starts_without_progress_come_to_an_end(run: Path) -> None:
    """A run that dies each time at the same sample is ended, with the count and the last line of its output."""
    code, state = _supervised(
        run, "starts(); progress(10); print('error: boom', file=sys.stderr, flush=True); os.kill(os.getpid(), 9)"
    )
    assert code == 4
    assert state.phase == "failed"
    assert "3 starts in a row made no progress" in state.why
    assert state.evidence == "boom"
    assert len((run / "starts").read_text()) == 1 + at_place.MOST_WITHOUT_PROGRESS


def test_slices_go_on_until_the_end(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 75 means: start me again, and nothing else ended a rank."""
    code, state = _supervised(run, "n = starts(); progress(n); sys.exit(75 if n < 4 else 0)")
    told = [line.partition(" ")[2] for line in capsys.readouterr().err.splitlines()]
    assert told == [f"restart {number}: a slice is over" for number in (1, 2, 3)]
    assert (code, state.restarts) == (0, 3), f"{state}; {at_place.last_error(run / 'launch' / 'output-0.log')}"


def test_each_restart_is_in_the_supervisors_log(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With its reason: the state on disk has the last one alone."""
    program = "n = starts(); progress(n); n < 3 and (os.kill(os.getpid(), 9) if n == 1 else sys.exit(75))"
    assert _supervised(run, program)[0] == 0
    told = [line.partition(" ")[2] for line in capsys.readouterr().err.splitlines()]
    assert told == ["restart 1: a rank was ended by SIGKILL", "restart 2: a slice is over"]


def test_a_rank_saves_when_its_supervisor_is_killed(run: Path) -> None:
    """The kernel sends it SIGTERM then: else two ranks would train one run once it is started again."""
    (run.parent / "rank.py").write_text(
        LOG + "signal.signal(signal.SIGTERM, lambda *_: (progress(7), sys.exit(130)))\nprogress(1)\nsignal.pause()"
    )
    program = (
        "import sys; from pathlib import Path; from stoker.launching import at_place, launcher\n"
        "run = Path(sys.argv[1])\n"
        "at_place.rank_command = lambda *_: [sys.executable, f'{run.parent}/rank.py', str(run)]\n"
        "at_place.HostSupervisor(run, launcher.HostRanks(), {}).run()"
    )
    log = run / "events.jsonl"
    with subprocess.Popen([sys.executable, "-c", program, str(run)]) as supervisor:
        _until(lambda: at_place.newest_samples(log) == 1)
        supervisor.kill()
    _until(lambda: at_place.newest_samples(log) == 7)


def test_a_run_whose_starter_is_killed_saves_and_leaves(run: Path) -> None:
    """An actor of Ray that was killed with its driver, in whose session ranks would train on."""
    (run.parent / "rank.py").write_text(
        LOG + "signal.signal(signal.SIGTERM, lambda *_: (progress(7), sys.exit(130)))\nprogress(1)\nsignal.pause()"
    )
    supervisor = (
        "import sys; from pathlib import Path; from stoker.launching import at_place, launcher\n"
        "run, parent = Path(sys.argv[1]), int(sys.argv[2])\n"
        "at_place.rank_command = lambda *_: [sys.executable, f'{run.parent}/rank.py', str(run)]\n"
        "at_place.HostSupervisor(run, launcher.HostRanks(), {}, parent).run()"
    )
    actor = (
        "import os, signal, subprocess, sys\n"
        "subprocess.Popen([sys.executable, '-c', *sys.argv[1:], str(os.getpid())])\nsignal.pause()"
    )
    log = run / "events.jsonl"
    with subprocess.Popen([sys.executable, "-c", actor, supervisor, str(run)]) as starter:
        _until(lambda: at_place.newest_samples(log) == 1)
        starter.kill()
    _until(lambda: (state := read_host_state(run / "launch" / "host-0.json")) is not None and state.phase == "stopped")
    assert at_place.newest_samples(log) == 7


def test_a_rank_that_ends_while_it_is_signalled_has_ended(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal that comes in the moment between two looks finds that the rank is gone: its exit code counts."""

    def beat(supervisor: HostSupervisor) -> None:
        (rank,) = supervisor._processes
        os.waitid(os.P_PID, rank.pid, os.WEXITED | os.WNOWAIT)
        supervisor._on_signal(signal.SIGTERM, None)

    monkeypatch.setattr(HostSupervisor, "_beat", beat)
    code, state = _supervised(run, "progress(1)")
    assert (code, state.phase) == (0, "finished")


def test_a_rank_whose_supervisor_is_gone_already_does_not_begin(run: Path) -> None:
    """It died between the start of the rank and the rank's word to the kernel, which then has nothing to signal."""
    command = [sys.executable, "-c", "print('begun')"]
    for parent, code, said in ((os.getpid(), 0, b"begun\n"), (1, at_place.STOPPED, b"")):
        program = [sys.executable, "-c", at_place._END_WITH_PARENT, str(parent), *command]
        ended = subprocess.run(program, capture_output=True, check=False)
        assert (ended.returncode, ended.stdout) == (code, said)


def _until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_a_failed_run_is_not_started_again(run: Path) -> None:
    """An error of the job repeats; its line is the evidence."""
    code, state = _supervised(run, "starts(); print('error: no setting lrr', file=sys.stderr); sys.exit(2)")
    assert (code, state.phase, state.evidence) == (2, "failed", "no setting lrr")
    assert (run / "starts").read_text() == "x"


def test_a_stop_saves_and_is_not_restarted(run: Path) -> None:
    """The signal reaches the rank, which leaves with 130; after a request to stop nothing starts again."""
    program = """
def leave(*_):
    progress(7)
    sys.exit(130)
signal.signal(signal.SIGTERM, leave)
starts()
Path(sys.argv[1], "launch", "stop").touch()
os.kill(os.getppid(), signal.SIGTERM)
signal.pause()
"""
    code, state = _supervised(run, program)
    assert (code, state.phase, state.exit_code) == (130, "stopped", 130)
    assert (run / "starts").read_text() == "x"


def test_a_requeued_run_counts_its_starts(run: Path) -> None:
    """A scheduler that starts the same order again and again without progress is made to give up."""
    order = replace(at_place.read_order(run), is_requeued=True)
    (run / "launch" / "order.json").write_text(dumps(order))
    program = "starts(); progress(5); sys.exit(75)"
    codes = [_supervised(run, program)[0] for _ in range(6)]
    assert codes == [75, 75, 75, 75, 4, 4]
    (run / "launch" / "order.json").write_text(dumps(replace(order, submitted_at="2026-11-26T10:00:00+00:00")))
    assert _supervised(run, program)[0] == 75, "another submission begins to count anew"


def test_starts_that_the_scheduler_takes_away_are_no_fault_of_the_run(run: Path) -> None:
    """Preempted while it starts, again and again: it goes on for longer than one that dies, and not for ever."""
    order_with(run, is_requeued=True)
    program = """
signal.signal(signal.SIGTERM, lambda *_: sys.exit(130))
os.kill(os.getppid(), signal.SIGTERM)
signal.pause()
"""
    codes = [_supervised(run, program)[0] for _ in range(at_place.MOST_TAKEN_AWAY + 1)]
    assert codes == [130] * at_place.MOST_TAKEN_AWAY + [4]
    order_with(run, submitted_at="2026-11-26T10:00:00+00:00")
    (run / "launch" / "stop").unlink(missing_ok=True)
    assert _supervised(run, "progress(5)")[0] == 0


def test_a_start_in_the_background_outlives_who_started_it(run: Path) -> None:
    """The program returns when the watching process has said that it is there, and that one goes on to the end."""
    (run.parent / "rank.py").write_text(LOG + "progress(3)")
    order = replace(at_place.read_order(run), job_file="rank.py")
    (run / "launch" / "order.json").write_text(dumps(order))
    at_place.start_in_background(run, HostRanks(), {})
    state = read_host_state(run / "launch" / "host-0.json")
    assert state is not None
    with suppress(ChildProcessError):  # it was so fast that the start has waited for it
        os.waitpid(state.pid, 0)
    assert state_of(run).phase == "finished"


def test_a_start_that_ends_at_once_says_why(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last words of the watching process are the error."""
    (run / "launch" / "order.json").write_text(dumps(replace(at_place.read_order(run), code="/no/such/folder")))
    monkeypatch.setattr(HostSupervisor, "_write", lambda *_: None)
    with pytest.raises(at_place.PlaceFailed, match=r"could not be started: .*no/such/folder"):
        at_place.start_in_background(run, HostRanks(), {})


def test_secrets_reach_the_rank_and_no_file(run: Path) -> None:
    """They are in the environment of the rank alone; nothing below the run's directory holds them."""
    code, _ = _supervised(run, "progress(1); sys.exit(0 if os.environ['SECRET'] == 'hunter2' else 2)")
    assert code == 0
    found = [path for path in run.rglob("*") if path.is_file() and b"hunter2" in path.read_bytes()]
    assert found == []


def test_a_file_of_secrets_is_read_once(tmp_path: Path) -> None:
    """It is deleted when it is read, and also when it cannot be used."""
    path = tmp_path / "secrets"
    path.write_text(json.dumps({"TOKEN": "x"}))
    assert read_secrets({"STOKER_SECRETS_FILE": str(path)}, from_input=False) == {"TOKEN": "x"}
    assert not path.exists()
    path.write_text("[1]")
    with pytest.raises(at_place.PlaceFailed):
        read_secrets({"STOKER_SECRETS_FILE": str(path)}, from_input=False)
    assert not path.exists()


def _state(**changes: Any) -> HostState:
    state = HostState(
        host=0,
        hostname=at_place.platform.node(),
        pid=os.getpid(),
        began=at_place._began(os.getpid()),
        boot=at_place._boot(),
        phase="running",
        why="training",
        at=utc_now(),
        submitted_at=ORDER.submitted_at,
    )
    return replace(state, **changes)


def _write(run: Path, *states: HostState) -> None:
    for state in states:
        (run / "launch" / f"host-{state.host}.json").write_text(dumps(state))


def test_a_supervisor_that_is_gone_is_lost(run: Path) -> None:
    """The evidence is the process that is not there any more, or another boot; a living one is believed."""
    _write(run, _state())
    assert state_of(run).phase == "running"
    with subprocess.Popen(["true"]) as gone:
        pass
    _write(run, _state(pid=gone.pid, began=1))
    lost = state_of(run)
    assert (lost.phase, lost.why) == ("lost", "was running and is gone")
    assert f"process {gone.pid}" in lost.evidence
    _write(run, _state(boot="another"))
    assert state_of(run).phase == "running", "a sign of life from another machine is believed"
    os.utime(run / "launch" / "host-0.json", (1, 1))
    assert "restarted, or its process is gone: no sign of life for" in state_of(run).evidence
    _write(run, _state(pid=gone.pid, began=1, phase="finished"))
    assert state_of(run).phase == "finished", "what has ended is not lost"


def test_a_process_that_nobody_has_waited_for_is_gone(run: Path) -> None:
    """A supervisor that was killed stays in the table of processes until its parent looks: it is not alive."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as ended:
        _write(run, _state(pid=ended.pid, began=at_place._began(ended.pid)))
        assert state_of(run).phase == "running"
        ended.kill()
        os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)
        assert state_of(run).phase == "lost"


def test_states_of_an_earlier_order_do_not_count(run: Path) -> None:
    """A run that was started again is starting until its hosts say otherwise."""
    _write(run, _state(phase="failed", submitted_at="2026-11-24T10:00:00+00:00"))
    assert state_of(run).phase == "starting"


def test_an_order_that_no_host_began_is_lost(run: Path) -> None:
    """As after a line that was cut between the order and the start: else nothing would ever run, or end."""
    assert state_of(run).phase == "starting"
    os.utime(run / "launch" / "order.json", (1, 1))
    lost = state_of(run)
    assert (lost.phase, lost.why) == ("lost", "it was sent, and no host ever started it")
    _write(run, _state())
    assert state_of(run).phase == "running"


def test_a_full_disk_is_evidence_of_a_run_that_could_not_write_why(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a failed or a lost one, in one sentence; one that goes on, or has room, says what it says."""
    lost = _state(phase="lost", why="was running and is gone")
    shown = combined([lost])
    assert noting_full_disk(shown, run, 16 << 10).evidence == f"the disk of {run} has 16.0 KiB free"
    told = combined([replace(lost, evidence="process 7 is gone")])
    assert noting_full_disk(told, run, 0).evidence == f"process 7 is gone; the disk of {run} has 0 B free"
    assert noting_full_disk(shown, run, 1 << 30) == shown
    running = combined([_state()])
    assert noting_full_disk(running, run, 0) == running
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=16 << 10))
    _write(run, _state(phase="failed", evidence="rank 0 ended with 1"))
    assert state_of(run).evidence == f"rank 0 ended with 1; the disk of {run} has 16.0 KiB free"


def test_several_hosts_are_one_state() -> None:
    """What goes on counts while a host goes on; one that is lost is evidence, and an end when none waits for it."""
    other = _state(host=1, hostname="box2")
    gone = replace(other, phase="lost", why="was running and is gone", evidence="no sign of life for 70 s")
    assert combined([_state(), other]).phase == "running"
    waiting = combined([_state(phase="requeued"), gone])
    assert waiting.phase == "requeued"
    assert "box2 is lost: no sign of life for 70 s" in waiting.evidence
    ended = combined([_state(phase="lost", why="a rank was ended by SIGKILL"), gone])
    assert ended.phase == "lost"
    failed = combined([_state(phase="stopped"), replace(other, phase="failed", why="a rank ended with exit code 2")])
    assert (failed.phase, failed.why) == ("failed", "box2: a rank ended with exit code 2")
    assert combined([_state(phase="finished"), gone]).phase == "finished"
    begun = [_state(began_at=f"2026-11-25T10:00:0{second}.000+00:00") for second in (2, 4, 3)]
    assert combined(begun).began_at == "2026-11-25T10:00:04.000+00:00", "the run is as late as its last host"


def test_a_host_that_fails_ends_the_others(run: Path) -> None:
    """Its mark stops the supervisors that would wait for it and start again."""
    code, state = _supervised(run, "starts(); sys.exit(2)", HostRanks(host=0, num_hosts=2, master="x", port=1))
    assert (code, state.phase) == (2, "failed")
    assert (run / "launch" / "stop").exists()
    program = """
signal.signal(signal.SIGTERM, lambda *_: sys.exit(130))
while True:
    signal.pause()
"""
    code, state = _supervised(run, program, HostRanks(host=0, num_hosts=2, master="x", port=1))
    assert (code, state.phase) == (130, "stopped")


def test_hosts_that_cannot_reach_each_other_are_said_before_ranks_start(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else they wait for each other until time-outs, and start again in vain; the other hosts are to leave, too."""
    order_with(run, kind="slurm", is_requeued=True, num_hosts=2)
    hosts = HostRanks(host=0, num_hosts=2, master="10.0.0.1", port=15007, addresses=("10.0.0.1", "10.0.0.2"))
    monkeypatch.setattr(at_place, "silent_hosts", lambda addresses, host, port: {1: "no answer in 5 s"})
    code, state = _supervised(run, "progress(1)", hosts)
    assert (code, state.phase) == (4, "failed")
    assert "cannot reach 10.0.0.2 on TCP port 15009 (no answer in 5 s)" in state.why
    assert (run / "launch" / "stop").exists()
    assert not (run / "events.jsonl").exists()


def test_stop_leaves_its_mark_without_a_process(run: Path) -> None:
    """Where nothing runs the request stays for the next start."""
    _write(run, _state(pid=1, began=-1))
    ask_to_stop(run)
    assert (run / "launch" / "stop").exists()


def order_with(run: Path, **changes: Any) -> None:
    """Change the order in a run's directory."""
    (run / "launch" / "order.json").write_text(dumps(replace(at_place.read_order(run), **changes)))


class Clock:
    """A clock of the supervisor that a test sets; the rest of `time` is as it is."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)

    def monotonic(self) -> float:
        """Time [s]; it passes where a test says so."""
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The supervisor's clock; each rank that ends has taken 100 s. A sign of life is due whenever it looks."""
    found = Clock()
    monkeypatch.setattr(at_place, "time", found)
    monkeypatch.setattr(at_place, "HEARTBEAT_S", 0.0)
    wait = HostSupervisor._wait

    def waited(self: HostSupervisor) -> list[int]:
        codes = wait(self)
        found.now_s += 100.0
        return codes

    monkeypatch.setattr(HostSupervisor, "_wait", waited)
    return found


def jumps(clock: Clock, monkeypatch: pytest.MonkeyPatch, moments: dict[Path, float]) -> None:
    """Let each moment [s after the supervisor began] come once a file is there, such as what a rank writes."""
    beat = HostSupervisor._beat

    def beat_and_jump(self: HostSupervisor) -> None:
        due = [after_s for path, after_s in moments.items() if path.exists()]
        beat(self)
        clock.now_s = max([clock.now_s, *(self._began_s + after_s for after_s in due)])

    monkeypatch.setattr(HostSupervisor, "_beat", beat_and_jump)


@pytest.mark.parametrize("is_requeued", [False, True])
def test_a_limit_is_of_all_starts_together(run: Path, clock: Clock, *, is_requeued: bool) -> None:
    """Slices of 100 s each: after four of them 500 s leave no time for another, whatever starts the run again."""
    order_with(run, most_held_s=500.0, save_s=1.0, is_requeued=is_requeued)
    program = "n = starts(); progress(n); sys.exit(75)"
    codes, state = [], None
    while not codes or codes[-1] == 75:
        code, state = _supervised(run, program)
        codes.append(code)
    assert codes == ([75, 75, 75, at_place.LIMIT_OVER] if is_requeued else [at_place.LIMIT_OVER])
    assert state is not None
    assert (state.phase, (run / "starts").read_text()) == ("stopped", "xxxx")
    assert state.why.endswith("of 8 min 20 s, the limit: saved and left")
    assert state.held_s == 400
    assert _supervised(run, program)[0] == at_place.LIMIT_OVER, "a scheduler that starts it again all the same"
    assert (run / "starts").read_text() == "xxxx"
    order_with(run, submitted_at="2026-11-26T10:00:00+00:00")
    (run / "launch" / "stop").unlink(missing_ok=True)
    assert _supervised(run, "progress(9)")[0] == 0, "another submission has the whole time"


READY = """
def ready():
    Path("ready.writing").write_text("x")
    Path("ready.writing").rename("ready")
    while True:
        signal.pause()
"""


def test_a_run_saves_before_its_limit_and_is_killed_at_it(
    run: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is asked to leave while there is time for a save; one that does not is not left to hold devices for ever."""
    order_with(run, most_held_s=1000.0, save_s=1.0)
    ready, moments = run.parent / "ready", dict[Path, float]()
    jumps(clock, monkeypatch, moments)
    moments[ready] = 945.0
    leaves = "signal.signal(signal.SIGTERM, lambda *_: (progress(7), sys.exit(130)))\nready()"
    code, state = _supervised(run, READY + leaves)
    assert (code, state.phase, state.samples) == (at_place.LIMIT_OVER, "stopped", 7)
    assert state.why.endswith("saved and left")
    (run / "launch" / "stop").unlink()
    ready.unlink()
    order_with(run, submitted_at="2026-11-26T10:00:00+00:00")
    moments[run / "launch" / "stop"] = 1000.0
    code, state = _supervised(run, READY + "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nready()")
    assert (code, state.phase) == (at_place.LIMIT_OVER, "stopped")
    assert state.why.endswith("it was killed, since it had not left before")


def test_a_save_that_takes_longer_than_forecast_is_left_the_time(
    run: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With 300 s to the limit it is asked to leave, since the log says that a save takes 180 s."""
    order_with(run, most_held_s=1000.0, save_s=1.0)
    jumps(clock, monkeypatch, {run.parent / "ready": 700.0})
    program = """
signal.alarm(10)  # nothing is saved where it is not asked to leave
signal.signal(signal.SIGTERM, lambda *_: (progress(9), sys.exit(130)))
fields = '{"samples": 7, "blocked_s": 1.0, "write_s": 179.0}'
(directory / "events.jsonl").write_text('{"kind": "checkpointed", "at": 1.0, "fields": %s}\\n' % fields)
ready()
"""
    code, state = _supervised(run, READY + program)
    assert (code, state.phase, state.samples) == (at_place.LIMIT_OVER, "stopped", 9)


def test_time_on_a_machine_that_is_gone_counts_by_the_log(run: Path, clock: Clock) -> None:
    """A preempted machine takes its disk along; the log that comes from the mirror says how long the run held it."""
    began = time.time() - 300.0
    order_with(run, most_held_s=450.0, save_s=1.0, submitted_at=datetime.fromtimestamp(began - 5, UTC).isoformat())
    kept = [
        Event(kind="started", at=began - 1000),
        Event(kind="stopped", at=began - 900),  # of an earlier submission
        Event(kind="started", at=began),
        Event(kind="progress", at=began + 250, fields={"samples": 1}),
    ]
    lines = "".join(f"{dumps(event, indent=None)}\n" for event in kept)
    (run.parent / "kept").write_text(lines)
    program = f"""
import time
starts()
(directory / "events.jsonl").write_text(Path({str(run.parent / "kept")!r}).read_text())
until = time.time() + 60
while b'"running"' not in (directory / "launch" / "host-0.json").read_bytes() and time.time() < until:
    time.sleep(0.05)
sys.exit(75)
"""
    code, state = _supervised(run, program)
    assert code == at_place.LIMIT_OVER
    assert state.held_s == pytest.approx(350)
    assert (run / "starts").read_text() == "x"
