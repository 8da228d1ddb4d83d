"""The process that asks a pool for the page of places: what it costs, and what it cannot do to the page."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest

from stoker.web import pool
from stoker.web.pool import Pool
from tests.web.browser import ask, asked, ui_of

_COUNTING = """
import json, os, sys
for number, _ in enumerate(sys.stdin):
    print(json.dumps({"number": number, "pid": os.getpid(), "problem": ""}), flush=True)
"""
_SILENT = "import sys, time\nprint('started', file=sys.stderr, flush=True)\ntime.sleep(600)"


def python(code: str) -> Pool:
    """A pool that this program answers for."""
    return Pool([sys.executable, "-I", "-c", code], "the pool https://x.example")


def run(work: Any) -> Any:
    """The result, with a limit."""
    return asyncio.run(asyncio.wait_for(work, 60))


def is_alive(pid: int) -> bool:
    """Whether a process runs."""
    return Path(f"/proc/{pid}").exists()


async def gone(pid: int) -> None:
    """Wait until a process has ended."""
    while is_alive(pid):  # noqa: ASYNC110 - the kernel tells nobody here
        await asyncio.sleep(0.01)


def test_one_process_answers_all_pages_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages that ask together or soon after get one answer; later ones another, of the same process."""

    async def work() -> None:
        found = python(_COUNTING)
        one, two = await asyncio.gather(found.document(), found.document())
        assert one is two is await found.document()
        assert one["number"] == 0
        monkeypatch.setattr(pool, "_FRESH_S", 0.0)
        after = await found.document()
        assert (after["number"], after["pid"]) == (1, one["pid"])
        await found.close()
        assert not is_alive(one["pid"])

    run(work())


def test_nobody_is_asked_until_somebody_looks_nor_long_after(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No process before the first request, none soon after the last; the next request starts another."""
    monkeypatch.setattr(pool, "_IDLE_S", 0.05)
    monkeypatch.setattr(pool, "_FRESH_S", 0.0)

    async def work() -> None:
        ui = ui_of(tmp_path, pool=(found := python(_COUNTING)))
        application = ui.application()
        for path in ("/api/places", "/api/runs", "/places"):
            assert (await asked(application, path)).status == 200
        assert found._process is None
        first = (await asked(application, "/api/pool")).json()
        assert (first["is_configured"], first["number"]) == (True, 0)
        await gone(first["pid"])
        assert (await asked(application, "/api/pool")).json()["pid"] != first["pid"]
        await found.close()

    run(work())


def test_a_pool_that_hangs_holds_up_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Other requests are answered in that time; its process is ended, what was known stays, and a sentence says so."""
    monkeypatch.setattr(pool, "_ANSWER_S", 3.0)

    async def work() -> None:
        ui = ui_of(tmp_path, pool=(found := python(_SILENT)))
        found._document = {"at": 5.0}
        application = ui.application()
        waiting = asyncio.create_task(asked(application, "/api/pool"))
        while found._process is None:  # noqa: ASYNC110 - nothing tells of its start
            await asyncio.sleep(0.01)
        pid = found._process.pid
        assert (await asked(application, "/api/places")).status == 200
        assert not waiting.done()
        answer = (await waiting).json()
        assert answer["problem"] == "the pool https://x.example did not answer within 3 s"
        assert "address right" in answer["remedy"]
        assert answer["at"] == 5.0
        assert not is_alive(pid)
        await found.close()

    run(work())


@pytest.mark.parametrize(
    ("code", "text", "remedy"),
    [
        ("import sys; sys.stdin.readline(); print('{torn', flush=True)", "cannot be shown", "Is it running"),
        ("import sys; sys.stdin.readline(); print('x' * (9 << 20), flush=True)", "cannot be shown", "Is it running"),
        ("import no_such_module", "No module named 'no_such_module'", "pip install 'stoker[pool]'"),
        ("raise SystemExit(3)", "what asks it has ended", "Is it running"),
    ],
)
def test_a_process_that_fails_is_a_sentence(code: str, text: str, remedy: str) -> None:
    """Torn JSON, too much of it, an end without a word."""

    async def work() -> dict[str, Any]:
        found = python(code)
        document = await found.document()
        await found.close()
        return document

    document = run(work())
    assert text in document["problem"]
    assert remedy in document["remedy"]


def test_a_program_that_is_not_there_is_a_sentence() -> None:
    """As where Python was removed since."""

    async def work() -> dict[str, Any]:
        found = Pool(["/no/such/program"], "the pool x")
        document = await found.document()
        await found.close()
        return document

    assert "cannot be shown" in run(work())["problem"]


def test_the_process_ends_with_the_page_s_server(tmp_path: Path) -> None:
    """However short its life was."""

    async def work() -> None:
        found = python(_COUNTING)
        ui = ui_of(tmp_path, pool=found)
        async with ui._lifespan(ui.application()):
            pid = (await found.document())["pid"]
        assert not is_alive(pid)

    run(work())


def test_without_a_pool_the_page_is_told_so(tmp_path: Path) -> None:
    """And nothing is asked."""
    assert ask(ui_of(tmp_path), "/api/pool").json() == {"is_configured": False}
