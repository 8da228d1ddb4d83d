"""Reading blocks of tensors that were written in pieces."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.errors import BadRun
from stoker.records import CheckpointManifest, Position, StoredPiece, StoredTensor
from stoker.training.sharded_tensors import opened, whole_from

WHOLE = torch.arange(7 * 5, dtype=torch.float64).view(7, 5)


def manifest_of(tensors: dict[str, StoredTensor]) -> CheckpointManifest:
    """A manifest that says where tensors lie."""
    return CheckpointManifest(
        spec_digest="s",
        position=Position(),
        stoker_version="0",
        torch_version="0",
        files=(),
        skeleton={},
        tensors=tensors,
    )


def written(folder: Path, rows: list[int], columns: list[int]) -> CheckpointManifest:
    """WHOLE cut at these rows and columns, its pieces dealt out to two files."""
    pieces, files = [], {"a": {}, "b": {}}
    row_ends, column_ends = [0, *sorted(set(rows)), 7], [0, *sorted(set(columns)), 5]
    for top, bottom in itertools.pairwise(row_ends):
        for left, right in itertools.pairwise(column_ends):
            file = "ab"[len(pieces) % 2]
            piece = StoredPiece(
                file=file, offsets=(top, left), sizes=(bottom - top, right - left), number=len(files[file])
            )
            files[file][piece.key("w")] = WHOLE[top:bottom, left:right].contiguous()
            pieces.append(piece)
    for name, tensors in files.items():
        safetensors.torch.save_file(tensors, folder / name)
    return manifest_of({"w": StoredTensor(shape=(7, 5), dtype="float64", pieces=tuple(pieces))})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where files go; one for all examples."""
    return tmp_path_factory.mktemp("stored")


@settings(max_examples=30)
@given(
    rows=st.lists(st.integers(1, 6), max_size=3),
    columns=st.lists(st.integers(1, 4), max_size=3),
    top=st.integers(0, 7),
    left=st.integers(0, 5),
    height=st.integers(0, 7),
    width=st.integers(0, 5),
)
def test_any_block_is_read_however_it_was_cut(
    folder: Path, rows: list[int], columns: list[int], top: int, left: int, height: int, width: int
) -> None:
    """Of each piece what meets the block, put where it belongs."""
    height, width = min(height, 7 - top), min(width, 5 - left)
    with opened(folder, written(folder, rows, columns)) as source:
        found = source.block("w", (top, left), (height, width))
    assert found.dtype == torch.float64
    assert torch.equal(found, WHOLE[top : top + height, left : left + width])


def test_a_scalar_is_read(tmp_path: Path) -> None:
    """It has no dimensions to cut."""
    safetensors.torch.save_file({"t": torch.tensor(3, dtype=torch.int32)}, tmp_path / "a")
    piece = StoredPiece(file="a", offsets=(), sizes=())
    with opened(tmp_path, manifest_of({"t": StoredTensor(shape=(), dtype="int32", pieces=(piece,))})) as source:
        assert int(source.block("t", (), ())) == 3


def test_pieces_that_are_not_all_of_it_are_refused(tmp_path: Path) -> None:
    """Unwritten memory is never taken for weights."""
    safetensors.torch.save_file({"w": WHOLE[:3].clone()}, tmp_path / "a")
    piece = StoredPiece(file="a", offsets=(0, 0), sizes=(3, 5))
    manifest = manifest_of({"w": StoredTensor(shape=(7, 5), dtype="float64", pieces=(piece,))})
    with opened(tmp_path, manifest) as source, pytest.raises(BadRun, match="holds 15 of 35 elements of w"):
        whole_from(source)("w", [5, 1])


def test_a_file_that_is_gone_is_told(tmp_path: Path) -> None:
    """With its path."""
    piece = StoredPiece(file="gone", offsets=(0,), sizes=(3,))
    manifest = manifest_of({"w": StoredTensor(shape=(3,), dtype="float64", pieces=(piece,))})
    with opened(tmp_path, manifest) as source, pytest.raises(BadRun, match="gone cannot be read"):
        whole_from(source)("w", [5, 1])
