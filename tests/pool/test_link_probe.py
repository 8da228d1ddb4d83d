"""An agent's link to the pool: what a blob takes on it, and what a renter reads of it."""

from __future__ import annotations

import hashlib
import itertools
import time
from pathlib import Path

import pytest

from stoker.pool import events as on
from stoker.pool.agent import offer_of
from stoker.pool.isolation import Bubblewrap
from stoker.pool.link_probe import SIZES, MeasuredLink, measured_link
from tests.pool.server import in_thread
from tests.pool.test_agent import DEVICE, LENDING
from tests.pool.test_control_plane import joined


class SlowLine:
    """A pool behind a line of 2 MiB/s up and 8 MiB/s down, of whose requests each takes 0.3 s by itself."""

    def __init__(self) -> None:
        self.now_s, self.held = 0.0, dict[str, bytes]()

    def put_blob(self, source: bytes | Path, *, through_pool: bool = False) -> str:
        assert through_pool, "no peer stands in for the pool"
        assert isinstance(source, bytes)
        digest = hashlib.sha256(source).hexdigest()
        self.held[digest] = source
        self.now_s += 0.3 + len(source) / (2 << 20)
        return digest

    def get_blob(self, digest: str, target: Path, *, most_bytes: int | None = None) -> None:
        assert most_bytes == len(self.held[digest])
        target.write_bytes(self.held[digest])
        self.now_s += 0.3 + most_bytes / (8 << 20)


def test_the_rate_is_the_lines_and_not_of_what_a_request_takes(tmp_path: Path) -> None:
    """Up and down apart; nothing is left on the disk."""
    line = SlowLine()
    found = measured_link(line, tmp_path, lambda: line.now_s)
    assert found.upload_bytes_per_s == pytest.approx(2 << 20)
    assert found.download_bytes_per_s == pytest.approx(8 << 20)
    assert [len(content) for content in line.held.values()] == list(SIZES)
    assert not list(tmp_path.iterdir())


def test_a_line_without_a_clock_is_a_lower_bound(tmp_path: Path) -> None:
    """Where the larger blob took no longer than the small one, its own time counts."""
    ticks = itertools.count()
    found = measured_link(SlowLine(), tmp_path, lambda: float(next(ticks)))
    assert found == MeasuredLink(upload_bytes_per_s=SIZES[1], download_bytes_per_s=SIZES[1])


def test_a_control_plane_takes_the_probe_and_shows_the_rates(tmp_path: Path) -> None:
    """By a real one: the blobs are this agent's alone, and the offer says what was measured."""
    with in_thread(tmp_path / "pool") as (_, operator):
        agent = joined(operator)
        link = measured_link(agent, tmp_path)
        assert link.upload_bytes_per_s > 0
        assert link.download_bytes_per_s > 0
        offer = offer_of(LENDING, DEVICE, Bubblewrap(), None, expires_s=time.time() + 60, link=link)
        agent.post(on.Offered(offer=offer))
        [listed] = operator.state("offers")
    assert listed["offer"]["upload_bytes_per_s"] == offer.upload_bytes_per_s == link.upload_bytes_per_s
    assert listed["offer"]["download_bytes_per_s"] == link.download_bytes_per_s
