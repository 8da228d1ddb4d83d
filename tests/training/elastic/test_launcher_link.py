from __future__ import annotations

import hashlib
import os
import re
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

from stoker.errors import BadJob, RunFailed
from stoker.training.elastic.rendezvous import WorkerRetired
from stoker.training.elastic.rendezvous_store import agreed_key, connect
from stoker.training.elastic.worker import ElasticWorker, LaunchedWorker, LauncherPlacement


@pytest.fixture(autouse=True)
def no_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interface for gloo is chosen, and not left to other tests."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")


USUAL = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}


def free_port() -> int:
    """A port where nothing listens."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def at(port: int, rank: int, size: int, **fields) -> ElasticWorker:
    """A member that a launcher started."""
    return LaunchedWorker(LauncherPlacement(rank=rank, size=size, local=rank, host="127.0.0.1", port=port, **fields))


def outcomes(*members: ElasticWorker) -> list[object]:
    """What each finds when all of them meet, in threads of their own."""
    found: list[object] = [None] * len(members)

    def meet(place: int) -> None:
        try:
            found[place] = members[place].meet()
        except (RunFailed, WorkerRetired) as problem:
            found[place] = problem

    threads = [threading.Thread(target=meet, args=(place,)) for place in range(len(members))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_the_usual_environment_is_understood() -> None:
    """Variables of torchrun, and of launchers that set the least."""
    assert LauncherPlacement.from_environment(USUAL) == LauncherPlacement(
        rank=1, size=4, local=1, host="10.0.0.1", port=29500
    )
    torchrun = {"LOCAL_RANK": "0", "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "2"}
    place = LauncherPlacement.from_environment(USUAL | torchrun)
    assert place is not None
    assert (place.local, place.has_store, place.attempt) == (0, True, "2")
    place = LauncherPlacement.from_environment(USUAL | torchrun | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"})
    assert place is not None
    assert place.attempt == "0"


@pytest.mark.parametrize("missing", USUAL)
def test_part_of_the_environment_is_no_launcher(missing: str) -> None:
    """Some variable left over in a shell makes no process a member."""
    assert LauncherPlacement.from_environment({name: value for name, value in USUAL.items() if name != missing}) is None


@pytest.mark.parametrize(("name", "value"), [("RANK", "four"), ("RANK", "4"), ("MASTER_PORT", "http")])
def test_a_senseless_environment_is_named(name: str, value: str) -> None:
    """The variable and its value are in the message."""
    with pytest.raises(BadJob, match=f"{name}={value}"):
        LauncherPlacement.from_environment(USUAL | {name: value})


def test_all_ranks_meet_once() -> None:
    """There is one generation, and no other after it."""
    port = free_port()
    first, second = at(port, 0, 2), at(port, 1, 2)
    assert first._open is not None  # served before another thread, which shares the interpreter, connects
    meetings = outcomes(first, second)
    assert [(one.rank, one.size, one.num_veterans) for one in meetings] == [(0, 2, 0), (1, 2, 0)]
    assert meetings[0].name == meetings[1].name
    assert not first.can_reform
    assert not first.is_called()
    with pytest.raises(RunFailed, match="rank 1 of 2 lost the others: a socket closed"):
        second.lost("a socket closed")


def test_the_first_of_those_that_came_says_who_did_not() -> None:
    """Once, with host, port and seconds; the others leave quietly, as soon as they hear of it."""
    port = free_port()
    first, second = at(port, 0, 4, patience_s=0.1), at(port, 1, 4, patience_s=60.0)
    found: list[object] = []
    thread = threading.Thread(target=lambda: found.extend(outcomes(second)))
    assert first._open.add("count", 0) == 0  # served from now on
    thread.start()
    first._open.get("launched/0/here/1")
    (problem,) = outcomes(first)
    thread.join()
    assert isinstance(problem, RunFailed)
    assert problem.message == f"2 of 4 processes met at 127.0.0.1:{port} in 100 ms: ranks 0-1 came, ranks 2-3 did not"
    assert isinstance(found[0], WorkerRetired)
    assert found[0].exit_code == 4


def test_a_store_that_nobody_serves_is_named_once_on_each_machine() -> None:
    """There is no service that lists the members, so the first process of a machine speaks."""
    port = free_port()
    with pytest.raises(RunFailed, match=re.escape(f"rank 1 of 4 got no answer from 127.0.0.1:{port} in ")):
        at(port, 1, 4, patience_s=0.5).meet()
    with pytest.raises(WorkerRetired):
        at(port, 2, 4, patience_s=0.5, speaks=False).meet()


def test_a_port_in_use_is_named() -> None:
    """Rank 0 cannot serve the store where something else listens."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(RunFailed, match=f"rank 0 cannot serve the meeting of 2 processes at 127.0.0.1:{port}"):
            at(port, 0, 2, patience_s=0.5).meet()


def listening(port: int) -> set[str]:
    """Addresses on which something of this machine listens at a port, in hexadecimal."""
    lines = [
        line.split() for kind in ("tcp", "tcp6") for line in Path(f"/proc/net/{kind}").read_text().splitlines()[1:]
    ]
    return {line[1].rpartition(":")[0] for line in lines if line[3] == "0A" and line[1].endswith(f":{port:04X}")}


def test_the_store_is_bound_to_the_address_given() -> None:
    """Not to all interfaces, where every machine of the network would reach it."""
    port = free_port()
    first = at(port, 0, 2)
    assert first._open is not None
    assert listening(port) == {"0100007F"}
    assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"


@pytest.mark.parametrize("secret", ["another secret of the same length", ""])
def test_a_rank_without_the_secret_is_named(secret: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether it has a wrong one or none; nothing that it wrote is believed."""
    monkeypatch.setenv("STOKER_SECRET", "a secret of at least sixteen characters")
    port = free_port()
    first = at(port, 0, 2, patience_s=10.0)
    open_store = first._open
    other = hashlib.sha256(secret.encode()).digest()

    def visit() -> None:
        store = connect("127.0.0.1", port, patience_s=10.0)
        store.set("launched/0/here/1", "")
        if store.add("launched/0/count", 1) == 2:
            store.set("launched/0/outcome", "complete")
        with suppress(RunFailed):
            agreed_key(store, other, "launched/0", 1, 2, 10.0)

    stranger = threading.Thread(target=visit)
    stranger.start()
    with pytest.raises(RunFailed, match="rank 0 of 2 met strangers: what answers as rank 1 does not know") as caught:
        first.meet()
    stranger.join()
    assert "STOKER_SECRET" in (caught.value.remedy or "")
    assert open_store.check(["launched/0/outcome"])


def test_a_patience_that_was_set_is_kept_and_told() -> None:
    """Not that of PyTorch's own attempts, which last longer."""
    began = time.monotonic()
    with pytest.raises(RunFailed, match=r"in (0\.[5-9] s|[5-9][0-9]{2} ms|[1-4]\.[0-9]+ s)"):
        at(free_port(), 1, 4, patience_s=0.5).meet()
    assert time.monotonic() - began < 5.0
