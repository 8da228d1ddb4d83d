"""Types of elements."""

import typing

import numpy as np
import pytest

from stoker.artifacts import datatype_of, dtype_of
from stoker.records import Datatype


@pytest.mark.parametrize("datatype", typing.get_args(Datatype))
def test_every_datatype_has_a_dtype_and_that_dtype_its_datatype(datatype: Datatype) -> None:
    """There and back, and from the other byte order as well."""
    dtype = dtype_of(datatype)
    assert datatype_of(dtype) == datatype
    assert datatype_of(dtype.newbyteorder(">")) == datatype


def test_strings_are_bytes_and_complex_numbers_are_nothing() -> None:
    """NumPy's strings of a fixed length have the protocol's one type of strings."""
    assert {datatype_of(np.dtype("S5")), datatype_of(np.dtype("U5"))} == {"BYTES"}
    with pytest.raises(KeyError):
        datatype_of(np.dtype(complex))
