"""Operators on whole numbers: exported, they give what PyTorch gives, to the last digit."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from stoker.engines import Graph, load_graph
from stoker.exporting import export_module, torch_export
from stoker.exporting.signature import input_specs
from stoker.exporting.torch_export import Flat, as_array, by_position
from stoker.records import BATCH, Datatype, TensorSpec

Answers = dict[str, torch.Tensor]

DATATYPES: dict[torch.dtype, Datatype] = {
    torch.int64: "INT64",
    torch.int32: "INT32",
    torch.int8: "INT8",
    torch.uint8: "UINT8",
    torch.float32: "FP32",
    torch.float64: "FP64",
}


class Calls(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[..., Answers]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: torch.Tensor) -> Answers:
        return self.function(*inputs)


def onnx_answers(path: Path, function: Callable[..., Answers], *inputs: torch.Tensor) -> Answers:
    """What ONNX Runtime gives for a function's graph."""
    flat = Flat(Calls(function), by_position)
    samples = {f"input_{i}": as_array(tensor) for i, tensor in enumerate(inputs)}
    specs = input_specs(samples, {})
    some = function(*(tensor[:1] for tensor in inputs))
    outputs = tuple(  # named unlike the nodes of a trace
        TensorSpec(name=f"answer {name}", datatype=DATATYPES[tensor.dtype], shape=(BATCH,))
        for name, tensor in some.items()
    )
    torch_export.write_graph(torch_export.trace(flat, samples, specs), path, specs, outputs)
    (engine,) = load_graph("onnxruntime", Graph(path=path, precision="fp32", inputs=specs, outputs=outputs))
    return {name.removeprefix("answer "): torch.from_numpy(array) for name, array in engine.run(samples).items()}


def require_equal(path: Path, function: Callable[..., Answers], *inputs: torch.Tensor) -> None:
    """The graph's answers are PyTorch's, bit for bit; of operators that differ, the first inputs and both answers."""
    found, wrong = onnx_answers(path, function, *inputs), {}
    for name, expected in function(*inputs).items():
        assert found[name].dtype == expected.dtype, name
        differ = ~torch.isclose(found[name], expected, rtol=0, atol=0, equal_nan=True)
        if differ.any():
            wrong[name] = [tensor[differ][0].item() for tensor in (*inputs, found[name], expected)]
    assert not wrong


def around(*centers: int) -> list[int]:
    """Whole numbers near the centers, of both signs."""
    return sorted({sign * (center + offset) for center in centers for offset in range(-3, 4) for sign in (1, -1)})


def quotients(dividend: torch.Tensor, divisor: Any) -> Answers:
    """Every operator that divides whole numbers."""
    return {
        "//": dividend // divisor,
        "%": dividend % divisor,
        "fmod": torch.fmod(dividend, divisor),
        "floor": torch.div(dividend, divisor, rounding_mode="floor"),
        "trunc": torch.div(dividend, divisor, rounding_mode="trunc"),
    }


NUMBERS: dict[torch.dtype, list[int]] = {
    torch.int64: [*around(0, 21, 2**24, 2**31, 2**32, 2**53, 10**17), 2000000011, 2**63 - 1, -(2**63)],
    torch.int32: [*around(0, 21, 2**24, 10**9), 2**31 - 1, -(2**31)],
    torch.int8: list(range(-128, 128)),
    torch.uint8: list(range(256)),
}
DIVISORS: dict[torch.dtype, list[int]] = {
    torch.int64: [1, -1, 3, -7, 1000, 2**24 + 1, -(2**31) - 11, 2**53 + 1],
    torch.int32: [1, -1, 3, -7, 1000, 2**24 + 1],
    torch.int8: [1, -1, 3, -7, 100],
    torch.uint8: [1, 3, 7, 200],
}


@pytest.mark.parametrize("dtype", NUMBERS)
def test_quotients_and_remainders_of_whole_numbers_are_exact(tmp_path: Path, dtype: torch.dtype) -> None:
    """Of either sign, by numbers and by tensors: in float32 100,000,001 floor-divided by -7 would be one more."""
    numbers = torch.tensor(NUMBERS[dtype], dtype=dtype)
    scalars = [7, 86400] if dtype in (torch.int32, torch.int64) else [7]
    scalars += [] if dtype == torch.uint8 else [-7]

    def by_numbers(dividend: torch.Tensor) -> Answers:
        return {f"{name} {n}": value for n in scalars for name, value in quotients(dividend, n).items()}

    require_equal(tmp_path / "scalar.onnx", by_numbers, numbers)
    pairs = torch.cartesian_prod(numbers, torch.tensor(DIVISORS[dtype], dtype=dtype))
    least = torch.iinfo(dtype).min  # divided by -1 it ends PyTorch's process too
    dividends, divisors = pairs[(pairs[:, 0] != least) | (pairs[:, 1] != -1)].unbind(1)
    require_equal(tmp_path / "tensor.onnx", quotients, dividends.contiguous(), divisors.contiguous())


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_the_least_number_divided_by_minus_one_does_not_end_the_process(tmp_path: Path, dtype: torch.dtype) -> None:
    """A request may ask for it; ONNX Runtime's own division is then a signal that ends the server."""

    def divided(dividend: torch.Tensor, divisor: torch.Tensor) -> Answers:
        return {"//": dividend // divisor, "%": dividend % divisor, "// -1": dividend // -1, "% -1": dividend % -1}

    numbers = torch.tensor([torch.iinfo(dtype).min, 5, -7], dtype=dtype)
    require_equal(tmp_path / "g.onnx", divided, numbers, torch.full_like(numbers, -1))


def test_means_of_whole_numbers_have_the_type_asked_for(tmp_path: Path) -> None:
    """The mean of 1, 0, 0 in floats is no whole number."""

    def function(numbers: torch.Tensor) -> Answers:
        rows = torch.stack([numbers % 5, numbers % 3, numbers % 2], 1)
        return {
            "mean": rows.mean(1, dtype=torch.float32),
            "share": (rows > 1).mean(1, dtype=torch.float32),
            "all": rows.mean((1,), keepdim=True, dtype=torch.float32)[:, 0],
        }

    require_equal(tmp_path / "g.onnx", function, torch.arange(-20, 20))


def test_large_whole_numbers_are_compared_as_pytorch_does(tmp_path: Path) -> None:
    """ONNX Runtime takes 1 for the larger of 1 and 2^31, which has the sign -1; hashes of 32 bits are such numbers."""

    def function(first: torch.Tensor, second: torch.Tensor) -> Answers:
        rows = torch.stack([first, second, first // 2, second // 3], 1)
        grid = torch.stack([rows, rows.flip(1) - 1], 2)
        return {
            "sign": first.sign(),
            "maximum": torch.maximum(first, second),
            "minimum": torch.minimum(first, second),
            "clamp": first.clamp(16777217, 2**31 + 2),
            "clamp by a tensor": torch.clamp(first, max=second),
            "clamp_min": first.clamp_min(1),
            "clamp_max": first.clamp_max(2**31),
            "clamp_min by a tensor": torch.clamp_min(first, second),
            "clamp_max by a tensor": torch.clamp_max(first, second),
            "amax": rows.amax(1),
            "amin": rows.amin(-1, keepdim=True)[:, 0],
            "amax of two dimensions": grid.amax((1, 2)),
            "max": rows.max(1).values,
            "min": rows.min(1).values,
            "index of the largest": rows.max(1).indices,
        }

    numbers = torch.tensor(around(0, 2**31, 2**32, 2**53, 2**53 + 2**31))
    require_equal(tmp_path / "g.onnx", function, *torch.cartesian_prod(numbers, numbers).T.contiguous())


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32, torch.float64])
def test_remainders_of_floats_are_exact(tmp_path: Path, dtype: torch.dtype) -> None:
    """They are no difference of two large numbers: 100,000,001 % 7.0 would be 0."""

    def function(numbers: torch.Tensor) -> Answers:
        return {str(divisor): numbers % divisor for divisor in (7.0, -7.0, 0.5, 86400.0)}

    numbers = torch.tensor([-0.3, 0.7, 6.5, *around(0, 21, 2**24, 10**8, 2**40)], dtype=torch.float64)
    require_equal(tmp_path / "g.onnx", function, numbers.to(dtype))


def test_whole_numbers_are_divided_by_a_fraction(tmp_path: Path) -> None:
    """The exporter makes floats of them first, and then another overload of the operator, for which it has no nodes."""
    require_equal(
        tmp_path / "g.onnx", lambda numbers: {"//": numbers // 7.5, "bool": (numbers > 0) // 2}, torch.arange(-20, 20)
    )


def test_a_model_that_divides_large_numbers_is_exported_for_the_engine_that_is_exact(tmp_path: Path) -> None:
    """OpenVINO divides in float32, and is refused with them."""

    class Days(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(7, 2)

        def forward(self, seconds: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            days = torch.div(seconds, 86400, rounding_mode="floor")
            return days, self.table(days % 7)

    seconds = torch.arange(8) * 86400 * 1000 + 1_764_288_000 - 1
    artifact = export_module(Days(), seconds, tmp_path / "m")
    assert artifact.manifest.engine == "onnxruntime"
