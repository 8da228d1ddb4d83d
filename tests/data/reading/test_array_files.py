"""Headers of NumPy files from elsewhere: what they say is read, whatever else they are is one error."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.data.reading.array_files import BadArrayFile, npy_header, npz_arrays


def npy(array: np.ndarray) -> bytes:
    """A .npy file."""
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()


def test_a_header_says_shape_order_dtype_and_where_the_elements_begin() -> None:
    """The elements follow at the offset, in the order stated."""
    content = npy(np.asfortranarray(np.arange(6, dtype="<i2").reshape(2, 3)))
    header = npy_header(io.BytesIO(content))
    assert (header.shape, header.is_fortran, header.dtype) == ((2, 3), True, np.dtype("<i2"))
    assert np.frombuffer(content, header.dtype, 6, header.offset).tolist() == [0, 3, 1, 4, 2, 5]


@given(st.data())
def test_a_damaged_header_raises_nothing_else(data: st.DataObject) -> None:
    """With any byte of it changed, or cut anywhere, a header is read or refused by the one error."""
    content = bytearray(npy(np.zeros((2, 3), np.float32)))
    content[data.draw(st.integers(0, 127))] = data.draw(st.integers(0, 255))
    del content[data.draw(st.integers(0, len(content))) :]
    with contextlib.suppress(BadArrayFile):
        npy_header(io.BytesIO(bytes(content)))


def test_a_header_that_is_no_python_is_refused() -> None:
    """NumPy's parser raises a SyntaxError or a TokenError there, which no reader of files expects."""
    content = npy(np.zeros(3)).replace(b"{'descr'", b"{('descr")
    with pytest.raises(BadArrayFile):
        npy_header(io.BytesIO(content))


def test_a_damaged_archive_is_one_error(tmp_path: Path) -> None:
    """Cut off, with a wrong byte in an array, or with one array of no name: whatever NumPy and zipfile raise."""
    path = tmp_path / "a.npz"
    np.savez_compressed(path, x=np.arange(1000) % 7)
    content = bytearray(path.read_bytes())
    assert npz_arrays(path)["x"].shape == (1000,)
    damaged = content.copy()
    damaged[len(content) // 2] ^= 255
    for wrong in (content[:-30], damaged, npy(np.zeros(3)), b""):
        path.write_bytes(wrong)
        with pytest.raises(BadArrayFile, match="cannot be read"):
            npz_arrays(path)
