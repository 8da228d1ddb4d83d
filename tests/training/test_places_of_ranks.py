from __future__ import annotations

import pytest

from stoker.errors import NoDevice
from stoker.testing import fake_device
from stoker.training import train
from stoker.training.elastic.rendezvous import Rendezvous


def _gpus(count: int) -> tuple[object, ...]:
    model = "NVIDIA A100-SXM4-80GB"
    return tuple(fake_device(kind="cuda", model=model, index=number, name=f"cuda:{number}") for number in range(count))


def _meeting(size: int) -> Rendezvous:
    return Rendezvous(number=1, rank=0, size=size, name="launched/0")


def test_ranks_of_several_machines_find_their_devices_on_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight processes on two machines of four GPUs are planned as eight, and no machine has to have eight."""
    monkeypatch.setattr(train, "attached_devices", lambda: _gpus(4))
    place = train._place("here", _meeting(8), {"LOCAL_WORLD_SIZE": "4"})
    assert place is not None
    assert (place.count, place.name, place.is_here) == (8, "8xcuda:0", True)
    alone = train._place("here", _meeting(4), {"LOCAL_WORLD_SIZE": "4"})
    assert alone is not None
    assert alone.count == 4


def test_too_few_devices_of_a_machine_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four processes of this machine need four devices here, and without LOCAL_WORLD_SIZE all of them do."""
    monkeypatch.setattr(train, "attached_devices", lambda: _gpus(2))
    for environ in ({"LOCAL_WORLD_SIZE": "4"}, {}):
        with pytest.raises(NoDevice):
            train._place("here", _meeting(8), environ)


def test_processes_on_a_cpu_share_it_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """One CPU has any number of processes, which divide its cores."""
    monkeypatch.setattr(train, "attached_devices", lambda: (fake_device(),))
    place = train._place("cpu", _meeting(4), {"LOCAL_WORLD_SIZE": "2"})
    assert place is not None
    assert (place.count, place.cores_each) == (4, 1)
    assert train._place("cpu", None, {}) is None
