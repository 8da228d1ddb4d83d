from __future__ import annotations

import json
import socket
import sys
from dataclasses import replace
from pathlib import Path
from threading import Thread

import pytest

import stoker
from stoker.errors import BadSetting, PlaceFailed
from stoker.launching import reachable_ports, ssh
from stoker.launching.at_place import LaunchOrder
from stoker.launching.bundle import Bundle, TreeFile
from stoker.launching.launcher import LaunchTarget, Request, Submission
from stoker.launching.meter import price_there
from stoker.launching.ssh import LAUNCHER
from stoker.records import dumps
from stoker.testing import LauncherConformance
from tests.launching.fake_ssh import fake_ssh

__all__ = ["fake_ssh"]


class TestConformance(LauncherConformance):
    launcher = LAUNCHER
    words = {  # noqa: RUF012 - a test's table
        "box": (1, 1, ""),
        "me@box:2222": (1, 1, ""),
        "a,me@b/2xcpu": (2, 2, "cpu"),
        "box/4xa100": (1, 4, "a100"),
        "box/here": (1, 1, ""),
    }
    bad_words = ("", "box/", "box/0xcpu", "a,,b", "a,a", "-oProxyCommand=x", "box/2x", "me@box:port", "a/2x8xh100")
    environments = (
        {"STOKER_HOST": "0", "STOKER_HOSTS": "1"},
        {"STOKER_HOST": "1", "STOKER_HOSTS": "2", "STOKER_MASTER": "10.0.0.1", "STOKER_PORT": "4711"},
    )
    unreachable = {  # noqa: RUF012 - likewise
        "hosts": ["127.0.0.1:1"],
        "directory": "/nowhere",
        "python": "python3",
        "stoker": "/nowhere",
    }


def test_a_host_has_no_price_that_a_limit_could_be_kept_by() -> None:
    """Unknown, not free: `--max-cost` is refused unless the user says a price."""
    target = LAUNCHER.parse("box/2xa100")
    assert price_there(target, Request(target=target), LAUNCHER)[0] is None
    assert price_there(target, Request(target=target, options={"price": "2.5"}), LAUNCHER)[0] == 2.5


def _about(**changes: list[str]) -> dict[str, list[str]]:
    about = {"python": ["3.11.2"], "disk": [str(50 << 20)], "cores": ["8"], "cpu": ["EPYC"], "load": ["0.1 0.1 0.1"]}
    return about | changes


TARGET = LaunchTarget(text="ssh:box/2xa100", kind="ssh", address="box", devices_each=2, device="a100")
CPU = LaunchTarget(text="ssh:box", kind="ssh", address="box")


@pytest.mark.parametrize(
    ("about", "clock_s", "target", "said"),
    [
        (_about(python=["3.9.1"]), 0.0, CPU, "box has no Python of at least 3.11"),
        (_about(), 3600.0, CPU, "the clock of box is 1 h ahead"),
        (_about(), -3600.0, CPU, "the clock of box is 1 h behind"),
        (_about(disk=["1000"]), 0.0, CPU, "of disk free"),
        (_about(gpu=["NVIDIA A100, 40960, 0, 550.1"]), 0.0, TARGET, "1 × NVIDIA A100; asked for: 2 × a100"),
        (_about(gpu=["NVIDIA L4, 23034, 0, 550.1"] * 2), 0.0, TARGET, "2 × NVIDIA L4; asked for: 2 × a100"),
        (_about(), 0.0, TARGET, "box has no GPU; asked for: 2 × a100"),
        (_about(readonly=["/home"]), 0.0, CPU, "/home cannot be written"),
    ],
)
def test_what_is_missing_is_a_sentence(
    about: dict[str, list[str]], clock_s: float, target: LaunchTarget, said: str
) -> None:
    """Each thing that the run needs and a host lacks is one sentence with the remedy."""
    (missing,) = ssh._missing("box", about, clock_s, target, {})
    assert said in missing
    assert ":" in missing or "asked for" in missing


def test_a_host_that_has_all_lacks_nothing() -> None:
    """What is there is not complained about; a wrong clock can be accepted."""
    gpus = ["NVIDIA A100-SXM4-40GB, 40960, 0, 550.1"] * 2
    assert ssh._missing("box", _about(gpu=gpus), 0.0, TARGET, {}) == []
    assert ssh._missing("box", _about(), 3600.0, CPU, {"clock": "any"}) == []
    facts = ssh._facts(_about(gpu=gpus), 0.2)
    assert facts["devices"].startswith("NVIDIA A100-SXM4-40GB (40 GiB), NVIDIA A100")
    assert facts["driver"] == "550.1"
    assert facts["clock"] == "as here"


def test_a_gpu_without_memory_of_its_own_has_a_name_alone() -> None:
    """One that shares the host's memory, as a GB10 does, has no number there."""
    facts = ssh._facts(_about(gpu=["NVIDIA GB10, [N/A], [N/A], 580.95.05"]), 0.0)
    assert facts["devices"] == "NVIDIA GB10; 8 cores, EPYC"
    assert facts["driver"] == "580.95.05"


@pytest.mark.parametrize(
    ("said", "device"),
    [
        ("NVIDIA GB10, [N/A], [N/A], 580.95.05", "NVIDIA GB10"),
        ("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.", ""),
    ],
)
def test_a_gpu_is_what_nvidia_smi_lists_and_not_what_it_complains_of(fake_ssh: Path, said: str, device: str) -> None:
    """The script of the probe distinguishes lines of the list from a sentence on the same output."""
    program = fake_ssh.parent / "bin" / "nvidia-smi"
    program.write_text(f'#!/bin/sh\necho "{said}"\n')
    program.chmod(0o755)
    failing = program.with_name("python3.12")  # as a shim of a version that is not installed
    failing.write_text("#!/bin/sh\nexit 127\n")
    failing.chmod(0o755)
    probe = LAUNCHER.probe(LAUNCHER.parse("box"), {})
    assert not probe.facts["Python"].startswith(",")
    assert probe.facts["devices"].startswith(f"{device or 'no GPU'}; ")
    assert not device or probe.device == device


def test_the_probe_reads_this_machine(fake_ssh: Path) -> None:
    """The script of the probe runs on a real machine, and changes nothing there."""
    before = sorted(path.name for path in fake_ssh.parent.iterdir())
    probe = LAUNCHER.probe(LAUNCHER.parse("box"), {"root": "disk/for/stoker"})
    assert probe.cores > 0
    assert probe.facts["clock"] == "as here"
    assert "free" in probe.facts["disk"]
    assert sorted({path.name for path in fake_ssh.parent.iterdir()} - {"ssh.log"}) == before


def test_an_order_of_another_version_is_a_sentence(fake_ssh: Path, tmp_path: Path) -> None:
    """And no traceback: it may be going on there, under a program that this one does not know."""
    launch = tmp_path / ".stoker" / "runs" / "conforming-1a2b3c" / "launch"
    launch.mkdir(parents=True)
    (launch / "handle.json").write_text("{}")
    (launch / "order.json").write_text('{"record": "LaunchOrder", "schema": 99}')
    with pytest.raises(PlaceFailed, match=r"box has .*/launch/order.json, which cannot be used"):
        LAUNCHER.start(TestConformance().submission("box"), lambda _: None)


def test_a_refused_login_is_said_by_the_probe(fake_ssh: Path) -> None:
    """One sentence, with what to do about it."""
    with pytest.raises(PlaceFailed, match="closed refuses the login") as refused:
        LAUNCHER.probe(LAUNCHER.parse("closed"), {})
    assert "ssh-copy-id" in str(refused.value.remedy)


def test_a_start_takes_three_commands_where_all_is_there(fake_ssh: Path, tmp_path: Path) -> None:
    """A look, the order, the start: each command costs what the login shell there does first."""
    program = {
        "stoker/__init__.py": b"",
        "stoker/launching/__init__.py": b"",
        "stoker/launching/at_place.py": b"print(1)",
    }
    stoker = Bundle(kind="stoker", name="stoker", files=tuple(TreeFile.of_bytes(*one) for one in program.items()))
    code = Bundle(kind="code", name="code", files=(TreeFile.of_bytes("job.py", b"pass"),))
    for run in ("first", "second"):
        fake_ssh.write_text("")
        about = Submission(run=run, target=CPU, code=code, stoker=stoker, job_file="job.py", environment=sys.executable)
        handle = LAUNCHER.start(about, lambda _: None)
        assert sorted(path.name for path in Path(handle["directory"], "launch").iterdir()) == [
            "handle.json",
            "order.json",
        ]
    assert sum(line.startswith("box ") for line in fake_ssh.read_text().splitlines()) == 3
    assert handle["sent_bytes"] == 0


def test_hosts_of_a_run_listen_for_each_other(tmp_path: Path, fake_ssh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two names of this machine reach each other; where hosts do not, those that listen are ended."""
    target, options = LAUNCHER.parse("a,b/cpu"), {"root": str(tmp_path / "runs"), "python": sys.executable}
    assert LAUNCHER.probe(target, options).facts["ports"] == "each host reaches each other one"
    assert " kill " not in fake_ssh.read_text()
    monkeypatch.setattr(ssh, "_PORTS", ssh._PORTS.replace('"ok" if', '"a firewall" if'))
    missing = LAUNCHER.probe(target, options).missing
    assert [sentence.partition(" at ")[0] for sentence in missing] == ["a cannot reach b", "b cannot reach a"]
    assert sorted(line.split()[0] for line in fake_ssh.read_text().splitlines() if " kill " in line) == ["a", "b"]


def test_a_host_that_may_listen_nowhere_is_one_sentence(
    tmp_path: Path, fake_ssh: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a jail without a network."""
    refused = 'raise OSError(1, "Operation not permitted")'
    monkeypatch.setattr(ssh, "_PORTS", ssh._PORTS.replace('server.bind(("", port))', refused))
    options = {"root": str(tmp_path / "runs"), "python": sys.executable}
    with pytest.raises(PlaceFailed, match="cannot try its ports: Operation not permitted"):
        LAUNCHER.probe(LAUNCHER.parse("a,b/cpu"), options)


def test_a_port_that_is_in_use_is_refused_unless_the_run_is_there(tmp_path: Path, fake_ssh: Path) -> None:
    """The probe cannot know whose it is: a run whose record is not here is found by its order, and goes on."""
    with socket.create_server(("", 0)) as other:
        port = str(other.getsockname()[1])
        options = {"root": str(tmp_path / "runs"), "python": sys.executable, "port": port}
        target = LAUNCHER.parse("a,b/cpu")
        probe = LAUNCHER.probe(target, options)
        assert (probe.missing, probe.facts["port"]) == ((), f"{port} of a is in use (Address already in use)")
        about = replace(TestConformance().submission("a,b/cpu"), options=options, secrets=())
        with pytest.raises(PlaceFailed, match=f"port {port} of a cannot be used"):
            LAUNCHER.start(about, lambda _: None)
        assert not list(tmp_path.glob("runs/runs/*"))
        launch = tmp_path / "runs" / "runs" / about.run / "launch"
        launch.mkdir(parents=True)
        handle = {"hosts": ["a", "b"], "directory": str(launch.parent), "python": sys.executable}
        (launch / "handle.json").write_text(json.dumps({**handle, "stoker": str(Path(stoker.__file__).parents[1])}))
        (launch / "order.json").write_text(dumps(LaunchOrder.of(about, "code", "stoker")))
        assert LAUNCHER.start(about, lambda _: None)["directory"] == str(launch.parent)
    with pytest.raises(BadSetting, match="port=80 is no port"):
        LAUNCHER.probe(target, options | {"port": "80"})


def test_what_answers_on_a_port_has_to_be_the_listener(capsys: pytest.CaptureFixture[str]) -> None:
    """A program that is there already, or nobody at all, is no host of the run."""
    with socket.create_server(("127.0.0.1", 0)) as other, socket.create_server(("127.0.0.1", 0)) as closed:
        ports = [server.getsockname()[1] for server in (other, closed)]
        closed.close()
        answering = Thread(target=_accept_once, args=(other,))
        answering.start()
        reachable_ports.reach("token", [f"127.0.0.1:{port}" for port in ports])
        answering.join()
    assert capsys.readouterr().out.splitlines() == ["something else answers there", "Connection refused"]


def _accept_once(server: socket.socket) -> None:
    server.accept()[0].close()
