from __future__ import annotations

import math
from typing import Any

import pytest

import stoker
from stoker.errors import BadSetting


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"label_smoothing": 1.0}, r"Objective\(label_smoothing=…\): wanted a share in \[0, 1\), got 1.0"),
        ({"label_smoothing": math.nan}, "got nan"),
        ({"label_smoothing": "0.1"}, "got '0.1'"),
        ({"scope": "group"}, r"Objective\(scope=…\): wanted \"sample\" or \"batch\", got 'group'"),
        ({"penalty": 0.1}, r"Objective\(penalty=…\): wanted a function of the model, got a float"),
    ],
)
def test_a_setting_that_cannot_be_meant_is_refused(given: dict[str, Any], problem: str) -> None:
    """Where it is written, with its value."""
    with pytest.raises(BadSetting, match=problem):
        stoker.Objective("cross_entropy", **given)
