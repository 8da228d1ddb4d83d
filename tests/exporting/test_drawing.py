"""Example inputs that are drawn."""

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from stoker.exporting.onnx_file import DRAWS, draw_inputs, likely_sizes
from stoker.records import TensorSpec


def looking_up(through: list[str], rows: int, axis: int = 0):
    """A graph that looks ids up in a table of so many rows, by way of other operations."""
    names = ["ids", *(f"t{at}" for at in range(len(through)))]
    nodes = [helper.make_node(op, [names[at]], [names[at + 1]]) for at, op in enumerate(through)]
    nodes.append(helper.make_node("Gather", ["table", names[-1]], ["y"], axis=axis))
    shape = (rows, 3) if axis == 0 else (3, rows)
    return helper.make_model(
        helper.make_graph(
            nodes,
            "g",
            [helper.make_tensor_value_info("ids", TensorProto.INT64, ["N", "T"])],
            [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
            [numpy_helper.from_array(np.zeros(shape, np.float32), "table")],
        )
    )


IDS = TensorSpec(name="ids", datatype="INT64", shape=("batch", "tokens"))


@pytest.mark.parametrize("through", [[], ["Identity"], ["Identity", "Flatten"]])
@pytest.mark.parametrize("axis", [0, 1])
def test_ids_are_below_the_rows_of_the_table_they_look_up(through: list[str], axis: int) -> None:
    """However many operations lie between, and whichever dimension is looked up."""
    ids = draw_inputs(looking_up(through, 5, axis), (IDS,), {"batch": 8, "tokens": 40})["ids"]
    assert (ids.min(), ids.max(), ids.shape) == (0, 4, (8, 40))


def test_numbers_that_look_nothing_up_are_flags() -> None:
    """0 or 1: small enough for whatever they are."""
    model = looking_up([], 5)
    model.graph.input[0].name = "other"
    assert set(draw_inputs(model, (IDS,), {"batch": 8, "tokens": 40})["ids"].ravel()) == {0, 1}


def test_masks_pass_over_the_second_half_of_every_other_sample() -> None:
    """So that padding has something to show."""
    spec = TensorSpec(name="attention_mask", datatype="INT64", shape=("batch", "tokens"))
    mask = draw_inputs(looking_up([], 5), (spec,), {"batch": 4, "tokens": 6})["attention_mask"]
    assert mask.sum(1).tolist() == [6, 3, 6, 3]


@pytest.mark.parametrize("shape", [("batch",), ()])
def test_a_mask_without_positions_is_drawn_as_other_inputs(shape: tuple[str, ...]) -> None:
    """One number a sample, or one for all: there is no second half of it."""
    spec = TensorSpec(name="mask", datatype="FP32", shape=shape)
    assert draw_inputs(looking_up([], 5), (spec,), {"batch": 8})["mask"].shape == (8,) * len(shape)


def test_likely_sizes_are_those_of_sequences_and_of_images() -> None:
    """By the number of dimensions; two names have two sizes."""
    image = TensorSpec(name="x", datatype="FP32", shape=("batch", 3, "h", "w"))
    assert likely_sizes((IDS,)) == {"tokens": 8}
    assert likely_sizes((image,)) == {"h": 64, "w": 128}


def encoding(op: str, *, swapped: bool = False):
    """A graph that encodes ids one-hot: by the operation, or by comparing them with a range."""
    number = np.array(257) if op == "OneHot" else np.arange(257)[None, None]
    weights = [numpy_helper.from_array(number, "number"), numpy_helper.from_array(np.array([0, 1]), "values")]
    asked = ["number", "wide"] if swapped else ["wide", "number"]
    nodes = [
        helper.make_node("Constant", [], ["axes"], value=numpy_helper.from_array(np.array([2]))),
        helper.make_node("Unsqueeze", ["ids", "axes"], ["wide"]),
        helper.make_node(op, [*asked, "values"] if op == "OneHot" else asked, ["y"]),
    ]
    takes = helper.make_tensor_value_info("ids", TensorProto.INT64, ["N", "T"])
    gives = helper.make_tensor_value_info("y", TensorProto.INT64, None)
    return helper.make_model(helper.make_graph(nodes, "g", [takes], [gives], weights))


@pytest.mark.parametrize(("op", "swapped"), [("OneHot", False), ("Equal", False), ("Equal", True)])
def test_ids_are_below_the_depth_of_their_one_hot_encoding(op: str, swapped: bool) -> None:
    """Zeros and ones alone are nonsense to a model of bytes, and move its answers."""
    ids = draw_inputs(encoding(op, swapped=swapped), (IDS,), {"batch": 8, "tokens": 400})["ids"]
    assert (ids.min(), ids.max()) == (0, 256)


def test_draws_differ_in_kind() -> None:
    """Floats of several sizes, numbers of no known range as flags and as bytes; each the same every time."""
    specs = (TensorSpec(name="x", datatype="FP32", shape=("batch", 99)), IDS)
    model = looking_up([], 5)
    model.graph.input[0].name = "other"
    each = [draw_inputs(model, specs, {"batch": 8, "tokens": 99}, number=number) for number in range(DRAWS)]
    assert [(one["x"] < 0).any() for one in each] == [True, False, True]
    assert [one["ids"].max() > 1 for one in each] == [False, True, False]
    assert each[2]["x"].std() < 0.2 < each[0]["x"].std()
