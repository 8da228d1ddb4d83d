"""Links measured by processes on this machine: what is found, not how fast it is."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import torch

from stoker.devices import attached_cpu
from stoker.errors import NoDevice, RunFailed
from stoker.profiling import link_worker, links
from stoker.profiling.links import measure_links
from stoker.records import Layout
from stoker.stepping.world import World
from stoker.testing.ranks import on_ranks
from tests.planning.trials import GPU

FOUND = {
    "collectives": {"all-reduce": [[4, 1e-3], [1000, 2e-3]], "point-to-point": [[4, 5e-4], [1000, 6e-4]]},
    "slowdown": {"arithmetic": 1.1, "memory": 1.4},
    "overlap": 0.3,
    "waits": [[1e-3, 2e-3]],
}


def measured_quickly(_world: World) -> dict[str, Any]:
    """A few small messages, each for a moment."""
    link_worker.SIZES, link_worker._SLICE_S, link_worker._MOST_CALLS = (4, 4096), 1e-3, 3
    link_worker._ROUNDS, link_worker._OVERLAPPED_BYTES = 1, 4096
    link_worker._MEETINGS, link_worker._ARITHMETIC_S = 2, (1e-3, 2e-3)
    return link_worker.measure(torch.device("cpu"))


def test_processes_measure_every_collective_together() -> None:
    """All agree on the times; two processes on one CPU are slowed down by each other or not, never sped up."""
    first, second = on_ranks(Layout(replicas=2), measured_quickly)
    assert first["collectives"].keys() == {"all-reduce", "all-gather", "reduce-scatter", "all-to-all", "point-to-point"}
    assert first["collectives"] == second["collectives"]
    for points in first["collectives"].values():
        assert [size for size, _ in points] in ([4, 4096], [8, 4096])
        assert all(seconds > 0 for _, seconds in points)
    assert all(ratio >= 1 for ratio in first["slowdown"].values())
    assert 0 <= first["overlap"] <= 1
    assert [arithmetic_s for arithmetic_s, _ in first["waits"]] == [1e-3, 2e-3]
    assert first["waits"] == second["waits"]
    assert all(wait_s >= 0 for _, wait_s in first["waits"])


def test_a_message_that_somebody_comes_late_to_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Turns of 5 ms, of which arithmetic has 2 ms and a message 1 ms: 2 ms are spent on waiting."""
    monkeypatch.setattr(link_worker, "_all_gather", lambda _: lambda: None)
    monkeypatch.setattr(link_worker, "_agreed", lambda *_: 1e-3)
    monkeypatch.setattr(link_worker, "_agreed_median", lambda *_: 1e-3)
    monkeypatch.setattr(link_worker, "_mean", lambda work: {"turn": 5e-3, "arithmetic": 2e-3}[work.__name__])
    assert link_worker._wait_s(2e-3) == pytest.approx(2e-3)
    monkeypatch.setattr(link_worker, "_mean", lambda _: 1e-3)
    assert link_worker._wait_s(2e-3) == 0


def test_messages_count_by_their_mean_without_the_slowest_tenth() -> None:
    """A hiccup does not count, and half of all waiting for a core counts by half."""
    assert link_worker._usual([1.0] * 9 + [100.0]) == 1.0
    assert link_worker._usual([1.0, 3.0] * 10) == pytest.approx(1 + 2 * 8 / 18)


def test_what_was_found_becomes_a_record(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines through the points, the cost of overlap, and the date."""
    monkeypatch.setattr(links, "_measured", lambda *_: FOUND)
    found = measure_links(attached_cpu(), 2, now=lambda: datetime(2026, 11, 22, tzinfo=UTC))
    assert (found.world_size, found.basis, found.overlap) == (2, "measured here", 0.3)
    assert found.slowdown == FOUND["slowdown"]
    assert found.waits == ((1e-3, 2e-3),)
    assert found.measured_at == "2026-11-22T00:00:00+00:00"
    cost = found.cost("all-reduce")
    assert (cost.alpha_s, cost.measured) == (1e-3, ((4, 1e-3), (1000, 2e-3)))
    assert cost.beta_s_per_byte == pytest.approx(1e-3 / 996)


def test_links_need_two_processes_and_as_many_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers and a remedy."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ValueError, match="at least 2"):
        measure_links(attached_cpu(), 1)
    with pytest.raises(NoDevice, match="between 4 GPUs cannot be measured: 1 are attached") as caught:
        measure_links(GPU, 4)
    assert "2xcpu" in (caught.value.remedy or "")


def test_a_process_that_fails_is_named_with_its_last_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module that is not there stands for whatever may go wrong."""
    monkeypatch.setattr(links, "_WORKER", "no_such_worker")
    with pytest.raises(RunFailed, match=r"process 0: .*no_such_worker"):
        measure_links(attached_cpu(), 2)


def test_a_worker_leaves_what_it_found_in_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A world of one measures what one can: no message between two."""
    monkeypatch.setattr(link_worker, "SIZES", (4,))
    monkeypatch.setattr(link_worker, "_SLICE_S", 1e-3)
    monkeypatch.setattr(link_worker, "_ROUNDS", 1)
    monkeypatch.setattr(link_worker, "_OVERLAPPED_BYTES", 4096)
    monkeypatch.setattr(link_worker, "_MEETINGS", 1)
    monkeypatch.setattr(link_worker, "_ARITHMETIC_S", (1e-3,))
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    before = torch.get_num_threads()
    try:
        link_worker.main(["0", "1", "cpu", "1", str(tmp_path)])
    finally:
        torch.set_num_threads(before)
    assert '"all-reduce"' in (tmp_path / "found.json").read_text()
    assert "point-to-point" not in (tmp_path / "found.json").read_text()
