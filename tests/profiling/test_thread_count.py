"""As many threads as asked for, as long as asked for."""

from __future__ import annotations

import pytest
import torch

from stoker.profiling.ceilings import computing_threads


@pytest.mark.parametrize("num_threads", [1, 2])
def test_threads_hold_within_their_block_even_if_it_fails(num_threads: int) -> None:
    """Afterwards there are as many as before."""
    before = torch.get_num_threads()
    with pytest.raises(ZeroDivisionError), computing_threads(num_threads):
        _ = 1 // 0
    with computing_threads(num_threads):
        assert torch.get_num_threads() == num_threads
    assert torch.get_num_threads() == before


def test_without_a_count_all_stays_as_it_is() -> None:
    """Inside as outside."""
    before = torch.get_num_threads()
    with computing_threads(None):
        assert torch.get_num_threads() == before
    assert torch.get_num_threads() == before
