"""OpenVINO on the CPU: reads ONNX and its own IR (`model.xml`), the fastest measured on x86.

One compiled model serves all instances: a stream of its own for each, one copy of the weights.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.artifacts.dtypes import Arrays, dtype_of
from stoker.engines import openvino_process
from stoker.engines.base import BadInput, Graph, cannot_load, cannot_run, not_installed, require_names
from stoker.errors import BadArtifact
from stoker.records import Datatype, ServingPrecision

openvino_process.withhold_telemetry()
try:
    import openvino
except ImportError as error:
    raise not_installed("openvino") from error

_HINTS: dict[ServingPrecision, str] = {"fp32": "f32", "int8": "f32", "int8+bf16": "bf16", "bf16": "bf16", "fp16": "f16"}
_TYPES: dict[str, Datatype] = {
    "boolean": "BOOL", "u8": "UINT8", "u16": "UINT16", "u32": "UINT32", "u64": "UINT64", "i8": "INT8", "i16": "INT16",
    "i32": "INT32", "i64": "INT64", "f16": "FP16", "bf16": "BF16", "f32": "FP32", "f64": "FP64",
}  # fmt: skip
_BF16 = dtype_of("BF16")
_WIDE = frozenset({"INT64", "UINT64", "UINT32"})
_LOWEST, _HIGHEST = -(2**31), 2**31 - 1
_TRIES = 8
"""Of a request that failed for another's sake: which stream takes it is not ours to say, and on a busy machine one does
several in a row."""
_MARK = 0xA5
"""A byte; numbers made of nothing else are no answer that a model gives to every question."""


class OpenVino:
    """One infer request of a compiled model.

    When shapes do not fit each other inside a graph, OpenVINO 2026.4 goes on refusing requests of the shapes that it
    answered last, until it is asked for others; and where the process has one thread for it, it does not even say so,
    but leaves the answer of the last request in place, and ends the process when the model is then given up. So a
    failure is looked for there; and a request that failed is asked again after one of another number of samples.
    """

    def __init__(self, compiled: Any, graph: Graph) -> None:
        self._request = compiled.create_infer_request()
        self._inputs = {spec.name: compiled.input(spec.name) for spec in graph.inputs}
        self._outputs = [(spec.name, compiled.output(spec.name), dtype_of(spec.datatype)) for spec in graph.outputs]
        self._wide = [spec.name for spec in graph.inputs if spec.datatype in _WIDE]
        self._fails_silently = compiled.get_property("INFERENCE_NUM_THREADS") < 2
        self._num_streams = compiled.get_property("NUM_STREAMS")
        self._answered: Arrays = {}

    def run(self, inputs: Arrays) -> Arrays:
        """Every output for these inputs."""
        # OpenVINO's tensors point into these arrays without holding them: they must live until it has answered.
        held = {name: _in_place(inputs[name]) for name in self._inputs}
        for name in self._wide:
            _require_32_bits(name, held[name])
        try:
            answers = self._infer(held)
        except RuntimeError as error:
            answers = self._again(held, error)
        self._answered = held
        return answers

    def close(self) -> None:
        """Forget the request; the compiled model goes with the last of them."""
        del self._request, self._inputs, self._outputs, self._answered

    def _infer(self, held: Arrays) -> Arrays:
        for name, array in held.items():
            self._request.set_tensor(self._inputs[name], _tensor(array))
        if self._fails_silently:
            for _, port, _ in self._outputs:
                _mark(self._request.get_tensor(port))
        self._request.infer(share_outputs=True)
        answers = {name: _copy(self._request.get_tensor(port), dtype) for name, port, dtype in self._outputs}
        has_samples = all(array.size for array in held.values())
        if self._fails_silently and has_samples and any(_is_marked(answer) for answer in answers.values()):
            raise RuntimeError("shapes inside the graph do not fit each other")
        return answers

    def _again(self, held: Arrays, error: RuntimeError) -> Arrays:
        """The answer after all, where it was an earlier request that could not be answered."""
        for _ in range(_TRIES):
            answered = [self._answers_others(held) for _ in range(self._num_streams)]
            if not any(answered):  # it is these inputs that cannot be computed
                break
            try:
                return self._infer(held)
            except RuntimeError:  # of a stream that none of the others came to
                continue
        # An engine that answers as before is not what failed. Each run takes the next stream: so all of them, twice.
        works = [bool(self._answered) and self._answers(self._answered) for _ in range(self._num_streams)]
        works += [self._answers_others(self._answered) for _ in range(self._num_streams)]
        raise cannot_run("openvino", error, is_input=any(works)) from error

    def _answers_others(self, inputs: Arrays) -> bool:
        """Whether another number of these samples can be answered; a run takes the streams of all instances in turn."""
        if not inputs:  # nothing was answered yet, and its tensors point to what is gone
            return False
        others = {
            name: array if array.ndim == 0 else np.concatenate([array, array]) if len(array) == 1 else array[:1].copy()
            for name, array in inputs.items()
        }
        return self._answers(others)

    def _answers(self, inputs: Arrays) -> bool:
        try:
            self._infer(inputs)
        except RuntimeError:
            return False
        return True


def load_all(graph: Graph) -> tuple[OpenVino, ...]:
    """As many engines as the graph asks for.

    Raises:
        BadArtifact: OpenVINO cannot load it, it has other inputs or outputs, or this CPU lacks the precision.
    """
    if graph.where != "cpu":
        raise BadArtifact("openvino runs on the CPU here", remedy="Use onnxruntime for an NVIDIA GPU.")
    if any(spec.datatype == "BYTES" for spec in (*graph.inputs, *graph.outputs)):
        # OpenVINO 2026.4 ends the process when a graph gives strings back.
        raise BadArtifact(f"{graph.path} takes or gives strings", remedy="Use onnxruntime for strings.")
    core = openvino.Core()
    hint = _HINTS[graph.precision]
    is_alone = graph.instances == graph.threads == 1
    try:
        model = core.read_model(graph.path)
        settings = {
            # Never left to the engine: where the CPU has bf16 it would compute fp32 graphs in it, unasked.
            "INFERENCE_PRECISION_HINT": hint,
            "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0",
            # A single stream of a single thread fails silently (see `OpenVino`); of two streams one is idle.
            "NUM_STREAMS": 2 if is_alone else graph.instances,
            "INFERENCE_NUM_THREADS": 2 if is_alone else graph.instances * graph.threads,
            # Two services on one machine would pin their threads to the same cores.
            "ENABLE_CPU_PINNING": False,
        }
        with openvino_process.signal_stack_kept():
            compiled = core.compile_model(model, "CPU", settings)
    except RuntimeError as error:
        raise cannot_load(graph.path, "openvino", error) from error
    _require_precision(compiled, hint, graph)
    _require_signature(compiled, graph)
    return tuple(OpenVino(compiled, graph) for _ in range(graph.instances))


def _require_precision(compiled: Any, hint: str, graph: Graph) -> None:
    """OpenVINO takes f16 for bf16, or f32, where the CPU cannot compute in it, and says so only here."""
    found = compiled.get_property("INFERENCE_PRECISION_HINT").get_type_name()
    if found != hint:
        raise BadArtifact(
            f"{graph.path} is to be computed in {graph.precision}; OpenVINO computes in {found} on this CPU",
            remedy="Serve another precision of this model here, or compress it again on this machine.",
        )


def _require_signature(compiled: Any, graph: Graph) -> None:
    for what, wanted, ports in (
        ("input", graph.inputs, compiled.inputs),
        ("output", graph.outputs, compiled.outputs),
    ):
        found = {name: _datatype(port) for port in ports for name in port.get_names()}
        several = {name for port in ports for name in port.get_names() if len(port.get_names()) > 1}
        known = {spec.name for spec in wanted}
        require_names(graph.path, what, wanted, {n: d for n, d in found.items() if n in known or n not in several})


def _datatype(port: Any) -> str:
    name: str = port.get_element_type().get_type_name()
    return _TYPES.get(name, name)


def _in_place(array: NDArray[Any]) -> NDArray[Any]:
    """The array itself, or a copy where OpenVINO could not read it where it lies."""
    return array if array.flags.c_contiguous and array.flags.writeable else array.copy()


def _require_32_bits(name: str, array: NDArray[Any]) -> None:
    """OpenVINO computes whole numbers in 32 bits on the CPU, and drops the others in silence."""
    if array.size and (array.min() < _LOWEST or array.max() > _HIGHEST):
        raise BadInput(f"openvino computes in 32 bits, and {name!r} has numbers that need more")


def _tensor(array: NDArray[Any]) -> Any:
    """The array as OpenVINO's tensor, in its memory."""
    if array.dtype == _BF16:
        return openvino.Tensor(array.view(np.int16), array.shape, openvino.Type.bf16)
    return openvino.Tensor(array, shared_memory=True)


def _copy(tensor: Any, dtype: np.dtype[Any]) -> NDArray[Any]:
    """The caller's own copy of a tensor, which the next run overwrites."""
    if dtype == _BF16:
        return np.array(tensor.data).view(_BF16)
    return np.array(tensor.data)


def _mark(tensor: Any) -> None:
    """Write over what an output held, to see whether it is written anew."""
    if tensor.size:
        tensor.data.reshape(-1).view(np.uint8)[:] = _MARK


def _is_marked(answer: NDArray[Any]) -> bool:
    """Whether nothing was written to an output."""
    return bool((answer.reshape(-1).view(np.uint8) == _MARK).all())
