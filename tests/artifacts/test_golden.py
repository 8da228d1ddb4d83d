"""Golden answers on disk."""

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from stoker.artifacts import Golden, difference, dtype_of
from stoker.artifacts.golden import read_golden
from stoker.errors import BadArtifact

STRINGS = np.array([[b"", b"a\0b"], ["ü".encode(), b"longer"]], dtype=object)


@pytest.mark.parametrize(
    "array",
    [
        STRINGS,
        np.zeros((0, 2), dtype=object),
        np.array([[1.5, -2.0]]).astype(dtype_of("BF16")),
        np.arange(6, dtype=np.float32).reshape(2, 3).T,
        np.array([True, False]),
        np.array([2**63], dtype=np.uint64),
    ],
)
def test_every_type_comes_back_as_it_was(tmp_path: Path, array: np.ndarray) -> None:
    """Strings with zeros in them, bfloat16, arrays that lie in memory otherwise, and types that need nothing."""
    path = tmp_path / "golden.safetensors"
    save_file(Golden({"x": array}, {"x": array}).as_tensors(), path)
    found = read_golden(path)
    for one in (found.inputs["x"], found.outputs["x"]):
        assert (one.shape, one.dtype) == (array.shape, array.dtype)
        assert difference({"x": one}, {"x": array}) == 0


@pytest.mark.parametrize("content", [b"", b"\xff" * 64, b"{}"])
def test_a_damaged_file_is_told(tmp_path: Path, content: bytes) -> None:
    """The path is in the message."""
    path = tmp_path / "golden.safetensors"
    path.write_bytes(content)
    with pytest.raises(BadArtifact, match=r"golden.safetensors cannot be read"):
        read_golden(path)


def test_a_single_number_stays_one(tmp_path: Path) -> None:
    """A sampling rate has no dimensions, and an engine refuses a row of one."""
    golden = Golden({"rate": np.array(16000)}, {"y": np.array(0.5)})
    save_file(golden.as_tensors(), tmp_path / "g.safetensors")
    found = read_golden(tmp_path / "g.safetensors")
    assert (found.inputs["rate"].shape, found.outputs["y"].shape) == ((), ())
