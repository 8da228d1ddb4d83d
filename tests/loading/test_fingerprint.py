from __future__ import annotations

import numpy as np
import pytest
import torch

from stoker.loading.samples import digest_of_arrays, digest_of_items, leaves_of

X, Y = torch.arange(20.0).view(10, 2), torch.arange(10)


def test_a_fingerprint_of_arrays_sees_every_value(monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to a size; beyond it, rows spread over all of them."""
    changed = X.clone()
    changed[9, 1] += 1
    assert digest_of_arrays([X]) != digest_of_arrays([changed])
    monkeypatch.setattr("stoker.loading.samples._WHOLE_BYTES", 8)
    monkeypatch.setattr("stoker.loading.samples._ROWS", 5)
    assert digest_of_arrays([X]) == digest_of_arrays([changed])  # row 9 is not one of them
    changed[8, 0] += 1
    assert digest_of_arrays([X]) != digest_of_arrays([changed])
    assert digest_of_arrays([X]) != digest_of_arrays([X[:9]])


def test_tensors_of_any_dtype_have_a_fingerprint() -> None:
    """Empty ones and those that NumPy lacks too."""
    tensors = [X.bfloat16(), X.bool(), torch.zeros(10, 0), X.to(torch.complex64), Y.to(torch.uint8)]
    assert len({digest_of_arrays([tensor]) for tensor in tensors}) == len(tensors)


def test_arrays_of_objects_are_known_by_what_they_hold() -> None:
    """Not by their address, which differs in each process: rows of a table with text, lists, named columns."""

    def items(text: str) -> list[np.ndarray | np.void]:
        text = f"a text of {text}"  # an object of its own
        named = np.array([(1, text)], dtype=[("number", int), ("text", object)])
        return [np.array([1, text, 2.5], dtype=object), np.array([[[1, text]], None], dtype=object), named, named[0]]

    for mine, same, other in zip(items("rows"), items("rows"), items("rats"), strict=True):
        assert mine.tobytes() != same.tobytes()
        assert digest_of_items("Rows:10", [(mine,)]) == digest_of_items("Rows:10", [(same,)])
        assert digest_of_arrays([mine]) == digest_of_arrays([same])
        assert digest_of_items("Rows:10", [(mine,)]) != digest_of_items("Rows:10", [(other,)])


def test_leaves_come_with_their_keys_in_order() -> None:
    """So that an entry renamed, or moved, is another sample."""
    assert leaves_of({"a": [1, (2, 3)], "b": {"c": 4}}) == ["a", 1, 2, 3, "b", "c", 4]
    assert leaves_of("word") == ["word"]


def test_items_are_told_apart_by_what_they_are_of() -> None:
    """The same few items of a longer data set are another fingerprint."""
    items = [(torch.zeros(2), 1)]
    assert digest_of_items("Digits:10", items) == digest_of_items("Digits:10", items)
    assert digest_of_items("Digits:10", items) != digest_of_items("Digits:11", items)
    assert digest_of_items("Digits:10", items) != digest_of_items("Digits:10", [(torch.zeros(2), 2)])
