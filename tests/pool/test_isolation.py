import contextlib
import ctypes
import json
import os
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from stoker.errors import NoDevice, PlaceFailed
from stoker.pool import isolation
from stoker.pool.control_group import ControlGroup
from stoker.pool.isolation import KINDS, Bubblewrap, Limits, Podman, Program, best_isolation, disk_bytes, remove_tree

HERE = Path(__file__).parent
ENVIRONMENT = {"PATH": "/usr/bin:/bin", "HOME": "/tmp"}  # noqa: S108 - inside
LIMITS = Limits(memory_bytes=256 << 20, cores=1, processes=64, disk_bytes=32 << 20, time_s=60)

KIND_IDS = [kind.name for kind in KINDS]


ANSWERED_BY_GVISOR = {
    "raise_the_limit_of_open_files",
    "make_a_user_namespace",
    "clone_into_a_user_namespace",
    "see_the_owners_processes",
    "submit_to_io_uring",
    "come_before_the_owner",
    "listen_to_packets",
}
"""Its own kernel does these for the program alone, in its own processes, priorities and interfaces: nothing of the host
is behind them."""


@pytest.fixture(params=KINDS, ids=KIND_IDS)
def kind(request):
    """Each kind of isolation that works here."""
    problem = request.param.trial()
    if problem is not None:
        pytest.skip(problem)
    return request.param


@pytest.fixture
def job():
    """A folder that programs of other users can be given: pytest's own are closed to them."""
    folder = Path("/var/tmp") / f"stoker-job-{os.getpid()}-{time.monotonic_ns()}"  # noqa: S108 - removed below
    folder.mkdir()
    yield folder
    remove_tree(folder)
    assert not folder.exists()


def python(kind, job, script, *, limits=LIMITS, stdin=b"", environment=ENVIRONMENT, shown="/given"):
    """Run a script in isolation: exit code, output, complaints."""
    program = Program(
        argv=(sys.executable, "-c", script),
        readable={shown: HERE},
        writable={"/job": job},
        folder="/job",
        environment=environment,
        limits=limits,
    )
    return kind.run(program, stdin=stdin)


def test_no_attempt_of_the_escape_list_succeeds(kind, job):
    """Files, devices, namespaces, network, other processes, the kernel's interfaces: each attempt is refused."""
    canary = Path("/var/tmp") / f"canary-{os.getpid()}"  # noqa: S108 - removed below
    canary.write_text("secret")
    shared = ctypes.CDLL(None).shmget(4711, 4096, 0o1666)
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as local:
        local.bind(f"\0stoker-canary-{os.getpid()}")
        local.listen()
        given = {
            "canary": str(canary),
            "home_file": str(next((path for path in Path.home().iterdir() if path.is_file()), Path.home() / "none")),
            "port": server.getsockname()[1],
            "pid": os.getpid(),
            "abstract": f"stoker-canary-{os.getpid()}",
            "shm": 4711,
            "readable": "/given",
        }
        for name in ("setpriv", "env"):
            (job / name).write_text(f'#!/bin/sh\n: > /tmp/path.{name}\nexec /usr/bin/{name} "$@"\n')
            (job / name).chmod(0o755)
        loader = {"LD_DEBUG": "files", "LD_DEBUG_OUTPUT": "/tmp/loader"}  # noqa: S108 - inside
        variables = {**ENVIRONMENT, "PATH": "/job:/usr/bin:/bin", **loader}
        script = (HERE / "escape_attempts.py").read_text()
        code, out, err = python(kind, job, script, stdin=json.dumps(given).encode(), environment=variables)
    canary.unlink()
    ctypes.CDLL(None).shmctl(shared, 0, None)
    assert code == 0, err.decode()
    results = json.loads(out)
    assert len(results) >= 40
    allowed = ANSWERED_BY_GVISOR if kind.name == "gvisor" else set()
    escaped = {name: text for name, text in results.items() if not text.startswith("failed")}
    assert set(escaped) <= allowed, escaped
    assert not (HERE / "stoker-was-here").exists()


def test_what_is_shown_may_lie_below_the_temporary_folder(kind, job):
    """An interpreter in an environment below /tmp is found there, as anywhere."""
    shown = "/tmp/some/where/given"  # noqa: S108 - inside
    code, out, err = python(kind, job, f"import os; print(len(os.listdir({shown!r})))", shown=shown)
    assert code == 0, err
    assert int(out) == len(list(Path(HERE).iterdir()))


def test_a_fork_bomb_ends_at_the_limit_of_processes(kind, job):
    """The owner's machine goes on starting processes while a job cannot start any more."""
    script = (
        "import os, time\n"
        "made = 0\n"
        "try:\n"
        "    while made < 5000:\n"
        "        if os.fork() == 0:\n"
        "            time.sleep(30); os._exit(0)\n"
        "        made += 1\n"
        "except OSError: pass\n"
        "print(made, flush=True)\n"
        "os._exit(0)\n"
    )
    _, out, _ = python(kind, job, script)
    assert int(out or b"0") < LIMITS.processes + 8
    assert subprocess.run(["true"], check=False).returncode == 0


def test_memory_beyond_the_limit_ends_the_job_with_a_sentence(kind, job):
    """A job that fills memory is ended, and the sentence names the limit."""
    script = "kept = []\nwhile True: kept.append(bytearray(b'x') * (1 << 24))"
    code, _, err = python(kind, job, script)
    assert code != 0
    assert b"memory" in err.lower(), err


@pytest.mark.parametrize("way", ["one file", "many files", "unlinked files", "empty folders"])
def test_a_full_disk_quota_ends_the_job(kind, job, way):
    """Neither a large file, nor many, nor files without a name, nor empty folders take more than the quota."""
    script = {
        "one file": "open('a', 'wb').write(b'x' * (1 << 28))",
        "many files": "for n in range(100000): open(f'f{n}', 'wb').write(b'x' * 65536)",
        "unlinked files": (
            "import os, time\nkept = []\n"
            "for n in range(64):\n"
            "    kept.append(open('f', 'wb')); os.unlink('f'); kept[-1].write(b'x' * (1 << 20)); kept[-1].flush()\n"
            "time.sleep(30)"
        ),
        "empty folders": "import os, time\nfor n in range(3000): os.mkdir(f'd{n}')\ntime.sleep(30)",
    }[way]
    limits = replace(LIMITS, disk_bytes=8 << 20) if way == "empty folders" else LIMITS  # each of them counts 4 KiB
    code, _, err = python(kind, job, f"{script}\nprint('done')", limits=limits)
    assert code != 0, err
    assert disk_bytes(job)[0] < 1 << 62
    assert sum(path.stat().st_blocks * 512 for path in job.rglob("*")) < 8 * LIMITS.disk_bytes


def test_folders_too_deep_to_be_counted_end_the_job(kind, job):
    """What the kernel does not let the owner's look reach counts as over the quota, and is removed nevertheless."""
    script = (
        "import os, time\n"
        "for n in range(1000):\n"
        "    os.mkdir('a' * 200); os.chdir('a' * 200)\n"
        "open('f', 'wb').write(b'x' * (1 << 20))\n"
        "time.sleep(30)"
    )
    code, _, err = python(kind, job, script)
    assert code != 0
    assert b"it writes more than" in err
    remove_tree(job / ("a" * 200))
    assert not any(job.iterdir())


def test_a_closed_folder_is_no_place_to_hide(tmp_path):
    """A folder that an ordinary owner cannot list counts as over the quota, and is removed nevertheless."""
    folder = tmp_path / "job"
    (folder / "closed").mkdir(parents=True)
    (folder / "closed" / "file").write_bytes(b"x" * 5000)
    (folder / "closed").chmod(0o300)
    script = (
        "import sys; from pathlib import Path; from stoker.pool.isolation import disk_bytes, remove_tree\n"
        "folder = Path(sys.argv[1])\nprint(disk_bytes(folder)[0]); remove_tree(folder); print(folder.exists())"
    )
    command = [sys.executable, "-c", script, str(folder)]
    if os.getuid() == 0:
        for path in (tmp_path, folder, folder / "closed", folder / "closed" / "file"):
            os.chown(path, 65534, 65534)
        folder = Path("/var/tmp") / f"stoker-closed-{os.getpid()}"  # noqa: S108 - removed by the script
        (tmp_path / "job").rename(folder)
        sticky = "setpriv --reuid 65534 --regid 65534 --clear-groups --"
        command = [*sticky.split(), sys.executable, "-c", script, str(folder)]
    said = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ}).stdout.split()
    assert said == [str(1 << 62), "False"]


@pytest.mark.slow
def test_folders_that_move_all_the_time_end_the_job(job, monkeypatch):
    """A job that renames what the look is about to open does not go uncounted for long."""
    kind = usable(Bubblewrap())
    monkeypatch.setattr(isolation, "disk_bytes", lambda folder: (0, False))
    code, _, err = python(kind, job, "import time; time.sleep(60)")
    assert code != 0
    assert b"it moves its folders so fast" in err


def test_memory_that_no_process_maps_is_refused_where_nothing_counts_it(job, monkeypatch):
    """Without a control group the resident set is all that is watched: shared memory outside of it is not to be had."""
    kind = usable(Bubblewrap())
    script = (
        "import ctypes, os\n"
        "shared = ctypes.CDLL(None).shmget(0, 4096, 0o1600)\n"
        "try: print(shared, os.memfd_create('x') > 0)\n"
        "except PermissionError: print(shared, 'refused')"
    )
    counted = (
        python(kind, job, script)[1].split()
        if ControlGroup.make("stoker-test", memory_bytes=1 << 28, processes=64, cores=1)
        else None
    )
    monkeypatch.setattr(ControlGroup, "make", classmethod(lambda cls, *_, **__: None))
    limits = Limits(memory_bytes=1 << 30, cores=1, processes=64, disk_bytes=32 << 20, time_s=60)
    assert python(kind, job, script, limits=limits)[1].split() == [b"-1", b"refused"]
    assert counted is None or counted[1] == b"True"


def test_output_takes_no_disk_and_little_memory(job):
    """A job that prints without end fills neither the owner's disk nor the agent's memory; the end is kept."""
    kind = usable(Bubblewrap())
    script = "for n in range(48): print('x' * (1 << 20))\nprint('last')"
    code, out, _ = python(kind, job, script)
    assert code == 0
    assert len(out) == 1 << 24
    assert out.endswith(b"last\n")


def test_where_a_device_is_lent_a_kind_is_taken_that_can(monkeypatch):
    """The strongest kind is of no use if it refuses every job."""
    for one in KINDS:
        monkeypatch.setattr(type(one), "trial", lambda self: None)
    assert best_isolation().name == "gvisor"
    assert best_isolation(devices=("/dev/nvidia0",)).lends_devices
    with pytest.raises(NoDevice, match="lends no devices here, and /dev/nvidia0 are lent"):
        best_isolation("gvisor", ("/dev/nvidia0",))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="processes are read in /proc")
def test_processes_are_counted_whatever_they_call_themselves():
    """A name that is no text neither hides a process nor ends the watch of the others: each program gives its own."""
    name = Path("/proc/self/comm")
    before = name.read_bytes()
    name.write_bytes(b"\xff\xfe) R 1")
    try:
        assert os.getpid() in isolation._descendants(os.getppid())
        assert isolation.cpu_s_of({os.getpid()}) > 0
    finally:
        name.write_bytes(before.rstrip(b"\n"))  # which only reading adds


def test_containers_of_a_killed_agent_are_removed(tmp_path, monkeypatch):
    """Podman's containers outlive their client: the next agent removes those whose agent is gone, and no others."""
    mine = f"{isolation._container_prefix(os.getpid())}abcdefgh"
    (tmp_path / "podman").write_text(
        "#!/bin/sh\n"
        f'[ "$1" = ps ] && echo {mine} stoker-1-999999999-abcdefgh stoker-other && exit\n'
        f'echo "$*" >> {tmp_path}/asked\n'
    )
    (tmp_path / "podman").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(Podman, "problem", lambda self: None)
    monkeypatch.setattr(isolation.Isolation, "trial", lambda self: "no more is tried")
    assert Podman().trial() == "no more is tried"
    assert (tmp_path / "asked").read_text() == "rm -f -t 0 stoker-1-999999999-abcdefgh\n"


def test_temporary_files_count_as_memory(kind, job):
    """What a job writes to /tmp and /dev/shm does not reach the owner's disk, and has an end."""
    script = "import os\nfor n in range(4096): open(f'/dev/shm/{n}', 'wb').write(b'x' * (1 << 20))\nprint('done')"
    code, out, _ = python(kind, job, script)
    assert code != 0
    assert b"done" not in out


def test_time_beyond_the_limit_ends_the_job(job):
    """The time limit ends a job that ignores signals."""
    kind = usable(Bubblewrap())
    script = "import signal, time\nfor n in (2, 15): signal.signal(n, signal.SIG_IGN)\ntime.sleep(600)"
    limits = Limits(memory_bytes=1 << 28, cores=1, disk_bytes=1 << 25, time_s=0.5)
    code, _, err = python(kind, job, script, limits=limits)
    assert code != 0
    assert b"runs for more than" in err


def test_killing_it_ends_all_its_processes(job):
    """Nothing of a job is left after the kill switch, whatever it started."""
    kind = usable(Bubblewrap())
    script = (
        "import os, time\nfor n in range(8):\n    if os.fork() == 0: os.setsid(); time.sleep(600)\n"
        "open('ready', 'w').close(); time.sleep(600)"
    )
    program = Program(
        argv=(sys.executable, "-c", script),
        writable={"/job": job},
        folder="/job",
        environment=ENVIRONMENT,
        limits=LIMITS,
    )
    process = kind.start(program)
    while not (job / "ready").exists():
        assert process.poll() is None
        time.sleep(0.01)
    before = descendants_named(job)
    process.kill()
    process.wait(60)
    assert before
    until = time.monotonic() + 60
    while left := [pid for pid in before if Path(f"/proc/{pid}").exists()]:
        assert time.monotonic() < until, left
        time.sleep(0.01)


def test_a_disk_without_room_for_the_quota_is_refused_first(job):
    """An owner's disk is not filled to the brim: the job does not start, and the sentence has the numbers."""
    kind = usable(Bubblewrap())
    with pytest.raises(PlaceFailed, match="are left to you"):
        python(kind, job, "", limits=Limits(memory_bytes=1 << 28, cores=1, disk_bytes=1 << 60))


def test_without_any_isolation_there_is_no_offer(monkeypatch):
    """Where no kind is installed, nothing falls back to a plain process; each kind's lack is named."""
    monkeypatch.setattr(isolation.shutil, "which", lambda name: None)
    with pytest.raises(NoDevice, match=r"gvisor: there is no runsc.*bubblewrap: there is no bwrap") as refused:
        best_isolation()
    assert "never run as a plain process" in str(refused.value)


def test_an_unknown_kind_is_named(monkeypatch):
    """A misspelt kind is refused with the nearest."""
    with pytest.raises(NoDevice, match="no such kind") as refused:
        best_isolation("bublewrap")
    assert "bubblewrap" in str(refused.value)


def usable(kind):
    """The kind, if it works here; else the test is skipped."""
    problem = kind.trial()
    if problem is not None:
        pytest.skip(problem)
    return kind


def descendants_named(job):
    """Processes of this machine that work in the job's folder."""
    found = []
    for path in Path("/proc").iterdir():
        if path.name.isdigit():
            with contextlib.suppress(OSError):
                if (path / "cwd").stat().st_ino == job.stat().st_ino:
                    found.append(int(path.name))
    return found
