from __future__ import annotations

from typing import Any

import pytest

import stoker
from stoker.errors import BadSetting


@pytest.mark.parametrize("name", ["every", "keep_every"])
@pytest.mark.parametrize(("given", "shown"), [(stoker.seconds(3), "Duration.*seconds"), (5, "5")])
def test_an_interval_is_counted_in_what_is_learned(name: str, given: Any, shown: str) -> None:
    """Seconds would evaluate at other places on each machine."""
    with pytest.raises(BadSetting, match=rf"Evaluation\({name}=…\): wanted epochs, samples or updates, got {shown}"):
        stoker.Evaluation(**{name: given})
