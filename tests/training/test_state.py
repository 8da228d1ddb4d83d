"""What a checkpoint keeps of nested state, and what it refuses."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.errors import RunFailed
from stoker.training.named_state import pack, unpack

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.bool]
LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "as it is": lambda tensor: tensor,
    "transposed": lambda tensor: tensor.transpose(0, -1) if tensor.dim() else tensor,
    "channels last": lambda t: t.contiguous(memory_format=torch.channels_last) if t.dim() == 4 else t,
    "every other row": lambda tensor: tensor[::2] if tensor.dim() else tensor,
    "expanded": lambda tensor: tensor.unsqueeze(0).expand(3, *tensor.shape),
}


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """Tensors of up to four dimensions, some empty, in several dtypes and layouts, with NaN among the floats."""
    shape = draw(st.lists(st.integers(0, 3), max_size=4))
    dtype, layout = draw(st.sampled_from(DTYPES)), draw(st.sampled_from(sorted(LAYOUTS)))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 100)))
    tensor = torch.randint(0, 9, shape, generator=generator).to(dtype)
    if tensor.is_floating_point() and tensor.numel():
        tensor.view(-1)[0] = draw(st.sampled_from([1.5, math.nan, math.inf, -0.0]))
    return LAYOUTS[layout](tensor)


KEYS = st.one_of(st.text("ab.'0", max_size=3), st.integers(-2, 12))
NUMBERS = st.one_of(st.integers(), st.floats(), st.booleans(), st.none(), st.text(max_size=4))


def nested(leaves: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Dicts, lists and tuples of `leaves`."""
    return st.recursive(
        leaves,
        lambda inner: st.one_of(
            st.lists(inner, max_size=3),
            st.dictionaries(KEYS, inner, max_size=3),
            st.lists(inner, max_size=2).map(tuple),
        ),
        max_leaves=8,
    )


def through_a_file(tree: Any, folder: Path) -> Any:
    """`tree` packed, written as JSON and safetensors, read again and unpacked."""
    skeleton, kept = pack(tree, "t")
    path = folder / "t.safetensors"
    safetensors.torch.save_file({name: tensor.contiguous() for name, tensor in kept.items()}, path)
    return unpack(json.loads(json.dumps(skeleton, allow_nan=False)), safetensors.torch.load_file(path))


def assert_same(one: Any, other: Any) -> None:
    """Equal in type, structure, order of keys, and every bit."""
    assert type(one) is type(other)
    if isinstance(one, torch.Tensor):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        plain = [tensor.clone(memory_format=torch.contiguous_format).view(-1) for tensor in (one, other)]
        flat = [tensor.view(torch.uint8) if tensor.numel() else tensor for tensor in plain]
        assert torch.equal(*flat)
    elif isinstance(one, dict):
        assert list(one) == list(other)
        for key, item in one.items():
            assert_same(item, other[key])
    elif isinstance(one, list | tuple):
        assert len(one) == len(other)
        for item, twin in zip(one, other, strict=True):
            assert_same(item, twin)
    else:
        assert repr(one) == repr(other)  # tells NaN from numbers and -0.0 from 0.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where files go; one for all examples."""
    return tmp_path_factory.mktemp("state")


@settings(max_examples=150)
@given(tree=nested(st.one_of(NUMBERS, tensors())))
def test_whatever_is_packed_comes_back_bit_for_bit(folder: Path, tree: Any) -> None:
    """Structure, key types and order, non-finite numbers, dtypes and every bit survive the files."""
    assert_same(through_a_file(tree, folder), tree)


@settings(max_examples=60)
@given(tensor=tensors())
def test_a_layout_without_overlaps_comes_back_as_it_was(folder: Path, tensor: torch.Tensor) -> None:
    """Strides are kept, so that kernels see the same layout and add in the same order."""
    restored = through_a_file([tensor], folder)[0]
    if tensor.numel() and 0 not in tensor.stride():
        assert restored.stride() == tensor.stride()


def test_a_tensor_that_is_there_twice_is_stored_once_and_comes_back_as_one(tmp_path: Path) -> None:
    """What shares its memory goes on sharing it: tied weights, and state that refers to itself."""
    weight = torch.randn(4, 3)
    tree = {"a": weight, "b": [weight, weight.view(4, 3)], "other view": weight[:2]}
    assert len(pack(tree, "t")[1]) == 2
    restored = through_a_file(tree, tmp_path)
    assert restored["a"] is restored["b"][0] is restored["b"][1]
    assert_same(restored, tree)


def test_keys_that_spell_the_same_path_do_not_overwrite_each_other(tmp_path: Path) -> None:
    """`{"a": {"b": …}}` and `{"a.b": …}` are two tensors, as are those under 0 and "0"."""
    tree = {"a": {"b": torch.zeros(1)}, "a.b": torch.ones(1), 0: torch.full((1,), 2.0), "0": torch.full((1,), 3.0)}
    assert_same(through_a_file(tree, tmp_path), tree)


def test_packing_copies_so_that_training_may_go_on(tmp_path: Path) -> None:
    """A tensor changed in place after it was packed is kept as it was."""
    weight = torch.zeros(3)
    _, kept = pack({"w": weight}, "t")
    weight.add_(1)
    assert kept["t.w"].tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    ("tree", "named"),
    [
        ({"hook": print}, "a builtin_function_or_method at t.hook"),
        ([{"f": lambda: 0}], "a function at t.0.f"),
        ({"s": {1, 2}}, "a set at t.s"),
        ({(1, 2): 0}, "a tuple as a key at t"),
        ({"m": torch.eye(2).to_sparse()}, "a sparse tensor at t.m"),
    ],
)
def test_what_only_pickle_could_keep_is_refused_by_name(tree: Any, named: str) -> None:
    """Functions, sets and odd keys have no place in a checkpoint; the error says what it is and where."""
    with pytest.raises(RunFailed, match="which a checkpoint cannot keep") as caught:
        pack(tree, "t")
    assert named in caught.value.message


def test_a_missing_tensor_is_an_error() -> None:
    """Half a state is never restored silently."""
    skeleton, _ = pack({"w": torch.zeros(2)}, "t")
    with pytest.raises(KeyError):
        unpack(skeleton, {})
