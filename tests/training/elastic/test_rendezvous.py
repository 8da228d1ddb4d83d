from __future__ import annotations

import json
import threading

import pytest
from torch.distributed import DistStoreError, HashStore

from stoker.errors import BadJob, RunFailed
from stoker.training.elastic.rendezvous import Rendezvous, WorkerRetired, require_same
from stoker.training.elastic.rendezvous_store import AuthenticatedStore

JOB = {"job": "ab12", "torch": "2.13.0"}


def found(*facts: dict[str, str]) -> list[BaseException | None]:
    """What each rank finds when all of them compare their facts."""
    store = HashStore()
    problems: list[BaseException | None] = [None] * len(facts)

    def compare(rank: int) -> None:
        meeting = Rendezvous(number=1, rank=rank, size=len(facts), name="1")
        try:
            require_same(store, meeting, facts[rank])
        except (BadJob, RunFailed, WorkerRetired) as problem:
            problems[rank] = problem

    threads = [threading.Thread(target=compare, args=(rank,)) for rank in range(len(facts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return problems


def test_the_same_facts_are_no_problem() -> None:
    """All ranks go on."""
    assert found(JOB, JOB, JOB) == [None, None, None]


def test_a_difference_is_told_on_rank_0_alone() -> None:
    """What differs, with its values and where; the others leave with the same code."""
    first, second, third = found(JOB, JOB | {"torch": "2.12.0"}, JOB)
    assert isinstance(first, BadJob)
    assert "torch is 2.13.0 on ranks 0, 2 and 2.12.0 on rank 1" in first.message
    assert "job is" not in first.message
    for other in (second, third):
        assert isinstance(other, WorkerRetired)
        assert other.exit_code == BadJob.exit_code
        assert "rank 0 refused the run" in other.why
        assert "torch is 2.13.0 on ranks 0, 2 and 2.12.0 on rank 1" in other.why


def test_a_rank_that_says_nothing_is_named() -> None:
    """No rank waits for it without end, and one rank says so."""
    store = HashStore()
    store.set("1/facts/1", json.dumps(JOB))
    with pytest.raises(RunFailed, match=r"^rank 2 of 3 did not say in 0.02 s"):
        require_same(store, Rendezvous(number=1, rank=0, size=3, name="1"), JOB, patience_s=0.02)
    with pytest.raises(WorkerRetired):
        require_same(store, Rendezvous(number=1, rank=1, size=3, name="1"), JOB, patience_s=0.02)


def test_a_generation_that_breaks_meanwhile_is_no_disagreement() -> None:
    """Where one is known to be lost, no rank waits, and it is reported as the loss that it is."""
    store = AuthenticatedStore(HashStore(), b"0" * 32, lambda: True)
    with pytest.raises(DistStoreError, match="another process was lost"):
        require_same(store, Rendezvous(number=1, rank=0, size=2, name="1"), JOB)


def test_a_fact_that_one_rank_does_not_know_differs() -> None:
    """An older version may tell fewer facts."""
    first, _ = found(JOB, {"job": "ab12"})
    assert isinstance(first, BadJob)
    assert "torch is 2.13.0 on rank 0 and unknown on rank 1" in first.message
