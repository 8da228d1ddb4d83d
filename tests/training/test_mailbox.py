"""Letters of threads that write."""

from __future__ import annotations

import threading

from torch.distributed import HashStore

from stoker.training.rank_messages import RankMailbox


def never() -> bool:
    """Wait on."""
    return False


def is_bad(letter: dict) -> bool:
    """Whether there is nothing more to wait for."""
    return "problem" in letter


def test_letters_come_by_rank_whenever_they_were_sent() -> None:
    """The one who waits has them once the last is there; then the store has none."""
    store = HashStore()
    boxes = [RankMailbox(store, "one", 3) for _ in range(3)]
    later = threading.Timer(0.05, lambda: boxes[1].post(1, {"n": 1}))
    boxes[2].post(2, {"n": 2})
    boxes[0].post(0, {"n": 0})
    later.start()
    assert boxes[0].letters(never, is_bad) == [{"n": 0}, {"n": 1}, {"n": 2}]
    later.join()
    assert store.num_keys() == 0


def test_after_a_problem_nobody_is_waited_for() -> None:
    """What is there is reported."""
    box = RankMailbox(HashStore(), "one", 3)
    box.post(2, {"problem": "full"})
    assert box.letters(never, is_bad) == [{"problem": "full"}]


def test_the_wait_ends_when_it_is_enough() -> None:
    """A process that is gone sends nothing."""
    box = RankMailbox(HashStore(), "one", 2)
    box.post(0, {})
    asked = []
    assert box.letters(lambda: len(asked.append(0) or asked) > 2, is_bad) is None


def test_letters_about_something_else_are_not_read() -> None:
    """Each checkpoint has a mailbox of its own."""
    store = HashStore()
    RankMailbox(store, "one", 1).post(0, {"n": 1})
    RankMailbox(store, "other", 1).post(0, {"n": 2})
    assert RankMailbox(store, "other", 1).letters(never, is_bad) == [{"n": 2}]
