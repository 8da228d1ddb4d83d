from __future__ import annotations

import os
import signal
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest

from stoker.errors import RunFailed
from stoker.training.elastic import supervisor
from tests.training.elastic.supervising import LONGEST_S, Told, apart, supervised

LONG = (100_000, 0.01)
"""More updates than a test waits for, each of so many seconds."""


def script(folder: Path, text: str) -> Path:
    """A worker of a test's own."""
    path = folder / "own_worker.py"
    path.write_text(textwrap.dedent(text), encoding="utf-8")
    return path


def met(told: Told, generation: int) -> dict[str, Any] | None:
    """What was reported of a generation, if it was formed, and its members have begun."""
    has_begun = any(one["kind"] == "update" and one["generation"] == generation for one in told.lines)
    return next((one for one in told.of("met") if one["generation"] == generation and has_begun), None)


def test_all_work_is_done_and_told_in_order(tmp_path: Path) -> None:
    """Without any trouble there is one generation, and each event arrives once, in order."""
    with supervised(tmp_path, 500, 0.0, workers=2) as told:
        told.wait(told.over)
    assert told.code == 0
    assert [one["update"] for one in told.lines if one["kind"] == "update"] == list(range(500))
    assert [kind for kind, _ in told.news] == ["met"]
    assert told.of("met")[0]["workers"] == [0, 1]


def test_others_go_on_without_a_worker_that_is_killed_and_it_returns(tmp_path: Path) -> None:
    """Survivors keep their order and what they know; the one that returns comes last, and learns it."""
    with supervised(tmp_path, *LONG, workers=3) as told:
        told.wait(lambda: met(told, 1))
        told.signal(0, signal.SIGKILL)
        told.wait(lambda: any(one["workers"] == [1, 2, 0] and met(told, one["generation"]) for one in told.of("met")))
    assert told.of("lost") == [{"worker": 0, "rank": 0, "why": "killed by SIGKILL", "generation": 1}]
    first, *later = told.of("met")
    assert later[0]["why"] == "worker 0 killed by SIGKILL"
    assert later[0]["seconds"] < 2.0
    # On a busy machine it may be back before the others have met.
    assert [(one["workers"], one["why"]) for one in later[1:]] in ([], [([1, 2, 0], "called")])
    assert told.of("restarted") == [{"worker": 0, "returns": 1, "most_returns": 3}]
    begun = [one for one in told.lines if one["kind"] == "met"]
    assert [(one["size"], one["veterans"]) for one in begun] == [(3, 0), (2, 2), (3, 2)][:: 1 if later[1:] else 2]
    assert {"done", "from 1", "from 2"} <= set(begun[1]["notes"])
    if later[1:]:
        assert later[0]["workers"] == [1, 2]
        made = told.updates(2)  # none, where the worker was back before the next update
        assert begun[2]["done"] == (made[-1] + 1 if made else begun[1]["done"])
    assert [one["spares"] for one in (first, *later)] == [[]] * (1 + len(later))


def test_a_worker_that_stands_still_is_named_and_left_out(tmp_path: Path) -> None:
    """A stopped process is killed after the silence that was given, so that it cannot go on later."""
    with supervised(tmp_path, *LONG, workers=2, silence_s=1.5, most_returns=0) as told:
        told.wait(lambda: met(told, 1))
        told.signal(1, signal.SIGSTOP)
        told.wait(lambda: met(told, 2))
        with pytest.raises(ProcessLookupError):
            told.signal(1, signal.SIGCONT)
    (lost,) = told.of("lost")
    assert (lost["worker"], lost["rank"]) == (1, 1)
    assert lost["why"].startswith("silent for 1.")
    assert lost["why"].endswith("(stopped)")
    assert told.of("left_out") == [{"worker": 1, "returns": 0, "most_returns": 0}]
    assert told.of("met")[1]["workers"] == [0]


def test_a_worker_that_stood_still_for_a_moment_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slow is not dead: it is named, and so is its return; continued within the patience, nothing is lost."""
    monkeypatch.setattr(supervisor, "NAMED_S", 1.0)
    with supervised(tmp_path, *LONG, workers=2, silence_s=30.0) as told:
        told.wait(lambda: met(told, 1))
        told.signal(1, signal.SIGSTOP)
        told.wait(lambda: told.of("silent"))
        seen = len(told.lines)
        told.signal(1, signal.SIGCONT)
        told.wait(lambda: told.of("awake"))
        told.wait(lambda: len(told.lines) > seen + 10)
        assert told.of("lost") == []
    (silent,), (awake,) = told.of("silent"), told.of("awake")
    assert (silent["worker"], silent["rank"], silent["is_stopped"], silent["patience_s"]) == (1, 1, True, 30.0)
    assert (awake["worker"], awake["rank"]) == (1, 1)
    assert awake["seconds"] >= silent["seconds"] >= 1.0


HANGS = """
    import sys, time
    from stoker.training.elastic.rendezvous import WorkerRetired
    from stoker.training.elastic.worker import ElasticWorker
    member = ElasticWorker.from_environment()
    try:
        meeting = member.meet()
        if meeting.number == 1 and meeting.rank == 1:
            time.sleep(1000)
        if meeting.number == 1:
            meeting = member.lost("rank 1 does not come")
        member.finished()
    except WorkerRetired as dismissed:
        sys.exit(dismissed.exit_code)
"""


def test_a_worker_that_hangs_while_others_wait_is_named(tmp_path: Path) -> None:
    """It shows life, but does not notice that the others have lost the generation."""
    with supervised(tmp_path, script=script(tmp_path, HANGS), workers=3, answer_s=0.5, most_returns=0) as told:
        told.wait(told.over)
    assert told.code == 0
    (lost,) = told.of("lost")
    assert (lost["worker"], lost["rank"]) == (1, 1)
    assert lost["why"] == "hung: it did not notice for 500 ms that the others had lost it"
    assert told.of("met")[1]["workers"] == [0, 2]


def test_spares_wait_until_the_layout_has_use_for_them(tmp_path: Path) -> None:
    """With a layout of an even number, the third worker waits, and takes the place of one that is lost."""
    settings = {"workers": 3, "least": 2, "usable": lambda number: number - number % 2, "most_returns": 0}
    with supervised(tmp_path, *LONG, **settings) as told:
        told.wait(lambda: met(told, 1))
        assert (told.of("met")[0]["workers"], told.of("met")[0]["spares"]) == ([0, 1], [2])
        told.signal(0, signal.SIGKILL)
        told.wait(lambda: met(told, 2))
        assert told.of("met")[1]["workers"] == [1, 2]
        assert [one["veterans"] for one in told.lines if one["kind"] == "met"] == [0, 1]


def test_with_fewer_than_the_least_the_run_fails_and_everybody_is_ended(tmp_path: Path) -> None:
    """The error says how many are left and how many it takes."""
    with supervised(tmp_path, *LONG, workers=2, least=2, most_returns=0) as told:
        told.wait(lambda: met(told, 1))
        told.signal(1, signal.SIGKILL)
        told.wait(told.over)
        with pytest.raises(ProcessLookupError):
            told.signal(0, signal.SIGCONT)
    assert isinstance(told.problem, RunFailed)
    assert told.problem.message == "1 of 2 processes are left, and the run needs 2"


def test_with_fewer_than_the_least_one_that_returns_is_waited_for(tmp_path: Path) -> None:
    """A layout that needs all of its processes goes on when the lost one is back."""
    with supervised(tmp_path, *LONG, workers=2, least=2) as told:
        told.wait(lambda: met(told, 1))
        told.signal(0, signal.SIGKILL)
        told.wait(lambda: met(told, 2))
    assert told.of("met")[1]["workers"] == [1, 0]


BAD_INPUT = """
    import sys, time
    from stoker.training.elastic.rendezvous import WorkerRetired
    from stoker.training.elastic.worker import ElasticWorker
    member = ElasticWorker.from_environment()
    print("wrong: 3 is not 4")
    print("use 4" if member.worker != 2 else "use 5 here")
    time.sleep(0.2 * member.worker)
    sys.exit(2)
"""


def test_an_error_of_the_users_is_shown_once_and_nobody_is_started_again(tmp_path: Path) -> None:
    """All workers find the same mistake: the run ends with its code."""
    with supervised(tmp_path, script=script(tmp_path, BAD_INPUT), workers=2) as told:
        told.wait(told.over)
    assert told.code == 2
    assert told.shown == ["wrong: 3 is not 4", "use 4"]
    assert told.news == []


SPLIT_OPINION = """
    import sys
    from stoker.training.elastic.rendezvous import WorkerRetired
    from stoker.training.elastic.worker import ElasticWorker
    member = ElasticWorker.from_environment()
    try:
        meeting = member.meet()
        if meeting.rank == 1:
            print("rank 1 sees no disk")
            sys.exit(4)
        member.lost("rank 1 is gone")
    except WorkerRetired as dismissed:
        sys.exit(dismissed.exit_code)
"""


def test_an_error_of_another_rank_is_shown_under_its_name(tmp_path: Path) -> None:
    """The others, dismissed, say nothing; their code is that of the run."""
    with supervised(tmp_path, script=script(tmp_path, SPLIT_OPINION), workers=3) as told:
        told.wait(told.over)
    assert told.code == 4
    assert told.shown == ["worker 1 exited with 4; its last words:", "rank 1 sees no disk"]


def test_a_mistake_that_all_make_is_not_made_again(tmp_path: Path) -> None:
    """If every worker fails by itself, none is started again, and the run ends with their code."""
    with supervised(tmp_path, script=script(tmp_path, "raise SystemExit(7)"), workers=2) as told:
        told.wait(told.over)
    assert told.code == 7
    assert told.of("restarted") == []


LOSES = """
    import sys
    from stoker.training.elastic.rendezvous import WorkerRetired
    from stoker.training.elastic.worker import ElasticWorker
    member = ElasticWorker.from_environment()
    try:
        member.meet()
        while True:
            member.lost("a product of 3 and 4")
    except WorkerRetired as dismissed:
        sys.exit(dismissed.exit_code)
"""


def test_members_that_lose_each_other_without_end_fail(tmp_path: Path) -> None:
    """Where no process is ever missing, meeting again does not help, and the reason is reported."""
    with supervised(tmp_path, script=script(tmp_path, LOSES), workers=2) as told:
        told.wait(told.over)
    assert isinstance(told.problem, RunFailed)
    assert "a product of 3 and 4" in told.problem.message
    assert len(told.of("met")) == supervisor.MOST_CAUSELESS + 1


def test_a_stop_is_passed_on_and_waited_for(tmp_path: Path) -> None:
    """Workers end as they do on SIGTERM, and the run with the code of an interrupted one."""
    with supervised(tmp_path, *LONG, workers=2) as told:
        told.wait(lambda: met(told, 1))
        assert told.supervisor is not None
        told.supervisor.stop(signal.SIGINT)
        told.wait(told.over)
    assert told.code == 130
    assert told.of("lost") == []


STUBBORN = """
    import signal, time
    from stoker.training.elastic.worker import ElasticWorker
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    member = ElasticWorker.from_environment()
    member.meet()
    member.event('{"kind": "update", "generation": 1}')
    time.sleep(1000)
"""


def test_a_second_interrupt_ends_workers_at_once(tmp_path: Path) -> None:
    """A worker that ignores the first is killed by the second."""
    with supervised(tmp_path, script=script(tmp_path, STUBBORN), workers=1) as told:
        told.wait(lambda: met(told, 1))
        assert told.supervisor is not None
        told.supervisor.stop(signal.SIGINT)
        time.sleep(0.2)
        assert not told.over()
        told.supervisor.stop(signal.SIGINT)
        told.wait(told.over)
    assert told.code == 130


def test_workers_die_with_their_supervisor(tmp_path: Path) -> None:
    """A killed supervisor leaves no worker behind that trains on."""
    with apart(tmp_path, *LONG, workers=2) as (process, _):
        process.kill()
        process.wait()
        pids = [int((tmp_path / f"pid-of-{worker}").read_text(encoding="utf-8")) for worker in range(2)]
        until = time.monotonic() + LONGEST_S
        while any(_lives(pid) for pid in pids):
            assert time.monotonic() < until
            time.sleep(0.01)


def _lives(pid: int) -> bool:
    """Whether a process runs; one that ended and was not waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_one_ctrl_c_is_one_interrupt(tmp_path: Path) -> None:
    """It reaches the workers as well as the supervisor, and they end as after one, not at once as after two."""
    with apart(tmp_path, *LONG, workers=1) as (process, told):
        os.killpg(process.pid, signal.SIGINT)
        told.read()
        assert process.wait() == 130


def test_losses_long_apart_are_not_counted_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that lasted has not failed repeatedly, and is started again however often it was before."""
    monkeypatch.setattr(supervisor, "STEADY_S", 0.0)
    with supervised(tmp_path, *LONG, workers=2, most_returns=1) as told:
        for generation in (1, 3):
            told.wait(lambda: met(told, generation))  # noqa: B023 - called at once
            told.signal(1, signal.SIGKILL)
        told.wait(lambda: met(told, 5))
    assert [one["returns"] for one in told.of("restarted")] == [1, 1]
    assert told.of("left_out") == []


HELD_UP = """
    import ctypes, sys
    from stoker.training.elastic.rendezvous import WorkerRetired
    from stoker.training.elastic.worker import ElasticWorker
    member = ElasticWorker.from_environment()
    meeting = member.meet()
    if meeting.number == 1 and meeting.rank == 0:
        ctypes.PyDLL(None).usleep(int(sys.argv[2]))  # with the interpreter's lock
        member.finished()
    else:
        try:
            member.lost("rank 0 does not come")
            member.finished()
        except WorkerRetired as dismissed:
            sys.exit(dismissed.exit_code)
"""


@pytest.mark.slow
def test_a_call_that_holds_the_interpreter_is_given_time(tmp_path: Path) -> None:
    """No sign of life can come from it: it is killed when the patience with it is over, and not before."""
    with supervised(tmp_path, 700_000, script=script(tmp_path, HELD_UP), workers=1, silence_s=1.6) as told:
        told.wait(told.over)
    assert (told.code, told.of("lost")) == (0, [])
    settings = {"workers": 2, "silence_s": 1.6, "answer_s": 60.0, "most_returns": 0}
    with supervised(tmp_path, 60_000_000, script=script(tmp_path, HELD_UP), **settings) as told:
        told.wait(told.over)
    (lost,) = told.of("lost")
    assert lost["rank"] == 0
    assert 1.6 <= float(lost["why"].removeprefix("silent for ").removesuffix(" s")) < 10.0
