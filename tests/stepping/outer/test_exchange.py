from __future__ import annotations

import pytest
import torch

from stoker.stepping.diloco_exchange import CODECS, MessageFormat, PendingExchange, SiteProgress
from stoker.stepping.world import ALONE, SIGNALS


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("count", [1, 1023, 1025])
@pytest.mark.parametrize("statistics", [0, 3])
def test_a_message_holds_what_was_put_in(dtype: torch.dtype, count: int, statistics: int) -> None:
    """Note, statistics and values come out of as many bytes as promised, wherever they lie in them."""
    form = MessageFormat(CODECS["none"], statistics, count, dtype)
    note = torch.cat([torch.tensor([48.0, 1.5, 0.25]), torch.ones(len(SIGNALS))]).double()
    means, values = torch.randn(statistics, dtype=dtype), torch.randn(count, dtype=dtype)
    message = form.pack(note, means, values)
    assert message.numel() == 8 * (3 + len(SIGNALS)) + (statistics + count) * dtype.itemsize
    found = form.note(message)
    assert (found.samples, found.loss_sum, found.seconds) == (48.0, 1.5, 0.25)
    assert found.signals == (1.0,) * len(SIGNALS)
    assert found.speed == 48 / 0.25
    assert torch.equal(form.statistics(message), means)
    assert torch.equal(form.values(message), values)


def test_done_is_told_since_the_last_time() -> None:
    """What was reported before is not repeated."""
    before, now = SiteProgress(16, 1.0, torch.tensor(3.0).double()), SiteProgress(48, 2.5, torch.tensor(9.0).double())
    assert now.since(before).tolist() == [32.0, 6.0, 1.5]


def test_alone_one_hears_oneself() -> None:
    """In a world of one nothing is sent, and the own message is all there is."""
    message = torch.arange(5, dtype=torch.uint8)
    assert [one.tolist() for one in PendingExchange(message, ALONE).received()] == [[0, 1, 2, 3, 4]]
