"""Numbers as they are given: Python's own, or NumPy's scalars, which become Python's own where they are kept.

So a setting reads, compares and is described alike, whatever it was computed with. NumPy is not imported: its scalars
say by `numbers` what they are.
"""

from __future__ import annotations

import numbers
import operator
from typing import Any, TypeGuard


def plain_number(value: Any) -> Any:
    """A scalar of NumPy's as a number of Python's; anything else, subclasses of `int` among it, as it is.

    >>> from fractions import Fraction
    >>> plain_number(Fraction(1, 4)), plain_number(32), plain_number("32"), plain_number(True)
    (0.25, 32, '32', True)
    """
    if isinstance(value, int):  # a bool, or a number that knows more, such as stoker.tokens
        return value
    if isinstance(value, numbers.Integral):
        return operator.index(value)
    return float(value) if isinstance(value, numbers.Real) else value


def is_number(value: object) -> TypeGuard[float]:
    """Whether it is a number, Python's or NumPy's; True and False are not."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def is_whole(value: object) -> TypeGuard[int]:
    """Whether it is a whole number by its type, Python's or NumPy's; True and False are not."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)
