from __future__ import annotations

import pytest

from stoker.errors import BadJob
from stoker.predicting.prediction_request import parse_most_bad


def test_a_share_and_a_number() -> None:
    """1 % of 1,999 rows are 19; a number stands for itself; both are written as they were."""
    assert parse_most_bad("1%").rows_of(1999) == 19
    assert parse_most_bad("3").rows_of(10) == 3
    assert [str(parse_most_bad(text)) for text in ("0.5%", "0")] == ["0.5%", "0"]


@pytest.mark.parametrize("text", ["", "%", "-1", "101%", "1.5", "nan%", "many"])
def test_anything_else_is_refused(text: str) -> None:
    """A limit that would never be reached, or always, is no limit."""
    with pytest.raises(BadJob, match="--max-bad"):
        parse_most_bad(text)
