"""One request in other forms."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from stoker.artifacts.golden import cut, filled, rows, sizes_of, stacked
from stoker.records import TensorSpec

SPECS = (
    TensorSpec(name="ids", datatype="INT64", shape=("batch", "tokens"), pad=7),
    TensorSpec(name="x", datatype="FP32", shape=("batch", 2, "tokens"), pad=0),
)


def request(batch: int, tokens: int) -> dict[str, np.ndarray]:
    """A request of that size."""
    return {
        "ids": np.arange(batch * tokens).reshape(batch, tokens),
        "x": np.ones((batch, 2, tokens), dtype=np.float32),
    }


@given(st.integers(1, 4), st.integers(1, 6), st.integers(0, 6))
def test_cutting_back_undoes_filling_up(batch: int, tokens: int, more: int) -> None:
    """What is filled up holds the request, and the pad beyond it."""
    asked = request(batch, tokens)
    full = filled(asked, SPECS, {"tokens": tokens + more, "batch": 99})
    assert sizes_of(full, SPECS) == {"batch": batch, "tokens": tokens + more}
    assert (full["ids"][:, tokens:] == 7).all()
    again = cut(full, SPECS, {"tokens": tokens})
    assert all((again[name] == asked[name]).all() for name in asked)


def test_what_has_no_dimensions_stays_an_array() -> None:
    """A number among tensors, such as a sampling rate."""
    spec = TensorSpec(name="rate", datatype="INT64", shape=())
    rate = {"rate": np.array(16_000)}
    assert isinstance(cut(rate, [spec], {"tokens": 1})["rate"], np.ndarray)
    assert filled(rate, [spec], {"tokens": 1})["rate"] == 16_000


@given(st.integers(1, 6))
def test_stacking_undoes_taking_apart(batch: int) -> None:
    """The samples of a request, one by one, are the request."""
    asked = request(batch, 3)
    again = stacked(rows(asked, slice(at, at + 1)) for at in range(batch))
    assert all((again[name] == asked[name]).all() for name in asked)
