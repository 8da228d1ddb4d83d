"""OpenVINO on the CPU: reads ONNX and its own IR (`model.xml`); the fastest engine measured on x86.

One compiled model serves all instances: one stream for each instance, one copy of the weights.

What it does to the process is undone. OpenVINO 2026.4 gives the calling thread a stack for signal handlers when its CPU
plug-in is loaded, and restores the previous one when the plug-in is unloaded. Two plug-ins that are not unloaded in
reverse order restore a stack that was freed: the next signal ends the process. That was seen with SIGTERM after a few
models were loaded and unloaded. OpenVINO and NNCF send usage reports to their makers; Stoker prevents it.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import numpy as np

from stoker.artifacts.dtypes import Arrays, dtype_of
from stoker.engines.base import (
    BadInput,
    BadValue,
    EngineRecord,
    Graph,
    cannot_load,
    cannot_run,
    not_installed,
    require_names,
)
from stoker.engines.lookup_bounds import BOUNDS, Lookup, bounded_lookups, lookup_fault
from stoker.engines.whole_numbers import HIGHEST, LOWEST, Range, exact_ranges, inexact
from stoker.errors import BadArtifact
from stoker.records import Datatype, ServingPrecision

_HINTS: dict[ServingPrecision, str] = {"fp32": "f32", "int8": "f32", "int8+bf16": "bf16", "bf16": "bf16", "fp16": "f16"}
_TYPES: dict[str, Datatype] = {
    "boolean": "BOOL",
    "u8": "UINT8",
    "u16": "UINT16",
    "u32": "UINT32",
    "u64": "UINT64",
    "i8": "INT8",
    "i16": "INT16",
    "i32": "INT32",
    "i64": "INT64",
    "f16": "FP16",
    "bf16": "BF16",
    "f32": "FP32",
    "f64": "FP64",
}
_BF16 = dtype_of("BF16")
_WIDE = frozenset({"INT64", "UINT64", "UINT32"})
_TRIES = 8
"""Attempts at a request that failed because of an earlier one: OpenVINO chooses the stream, and on a busy machine may
choose the same one several times in a row."""
_MARK = 0xA5
"""Byte that marks unwritten outputs; no model answers with numbers made of it alone."""


class OpenVino:
    """One infer request of a compiled model.

    When shapes inside a graph do not fit each other, OpenVINO 2026.4 keeps refusing requests of the shapes it answered
    last, until it gets others. With a single thread it does not report the failure: it leaves the last answer in place,
    and ends the process when the model is released. So outputs are marked there to detect this, and a failed request
    is repeated after one with another number of samples.
    """

    def __init__(
        self,
        library: Any,
        compiled: Any,
        graph: Graph,
        lookups: Sequence[Lookup] = (),
        ranges: Mapping[str, Range] = MappingProxyType({}),
    ) -> None:
        self._library = library
        self._lookups, self._bounds = lookups, compiled.output(BOUNDS) if lookups else None
        self._request = compiled.create_infer_request()
        self._inputs = {spec.name: compiled.input(spec.name) for spec in graph.inputs}
        self._outputs = [(spec.name, compiled.output(spec.name), dtype_of(spec.datatype)) for spec in graph.outputs]
        wide = {spec.name: (LOWEST, HIGHEST) for spec in graph.inputs if spec.datatype in _WIDE}
        self._ranges: dict[str, Range] = wide | dict(ranges)
        self._fails_silently = compiled.get_property("INFERENCE_NUM_THREADS") < 2
        self._num_streams = compiled.get_property("NUM_STREAMS")
        self._answered: Arrays = {}

    def run(self, inputs: Arrays) -> Arrays:
        """Every output for these inputs."""
        # OpenVINO's tensors point into these arrays without holding them: they must live until it has answered.
        held: Arrays = {}
        for name in self._inputs:
            array = inputs[name]
            held[name] = array if array.flags.c_contiguous and array.flags.writeable else array.copy()
        for name, (least, greatest) in self._ranges.items():
            if held[name].size and (held[name].min() < least or held[name].max() > greatest):
                raise BadValue(inexact(name, (least, greatest)))
        try:
            answers = self._infer(held)
        except RuntimeError as error:
            answers = self._retry(held, error)
        self._answered = held
        return answers

    def close(self) -> None:
        """Drop the request; the compiled model ends with the last of them."""
        del self._request, self._inputs, self._outputs, self._answered, self._bounds

    def _infer(self, held: Arrays) -> Arrays:
        for name, array in held.items():
            if array.dtype == _BF16:
                tensor = self._library.Tensor(array.view(np.int16), array.shape, self._library.Type.bf16)
            else:
                tensor = self._library.Tensor(array, shared_memory=True)
            self._request.set_tensor(self._inputs[name], tensor)
        if self._fails_silently:
            for _, port, _ in self._outputs:
                output = self._request.get_tensor(port)
                if output.size:
                    output.data.reshape(-1).view(np.uint8)[:] = _MARK
        self._request.infer(share_outputs=True)
        answers = {}
        for name, port, dtype in self._outputs:
            answer = np.array(self._request.get_tensor(port).data)  # a copy: the next run overwrites the tensor
            answers[name] = answer.view(_BF16) if dtype == _BF16 else answer
        if self._fails_silently and all(array.size for array in held.values()):
            for answer in answers.values():
                if bool((answer.reshape(-1).view(np.uint8) == _MARK).all()):
                    raise RuntimeError("shapes inside the graph do not fit each other")
        if self._lookups and (
            fault := lookup_fault(self._lookups, self._request.get_tensor(self._bounds).data.tolist())
        ):
            raise BadInput(f"openvino could not compute this: {fault}")
        return answers

    def _retry(self, held: Arrays, error: RuntimeError) -> Arrays:
        """The answer on a later attempt, if the failure was that of an earlier request."""
        for _ in range(_TRIES):
            answered = [self._answers_others(held) for _ in range(self._num_streams)]
            if not any(answered):  # these inputs cannot be computed
                break
            try:
                return self._infer(held)
            except RuntimeError:  # on a stream that the others did not reach
                continue
        # An engine that answers earlier inputs has not failed. Each run takes the next stream: so all of them, twice.
        works = [bool(self._answered) and self._answers(self._answered) for _ in range(self._num_streams)]
        works += [self._answers_others(self._answered) for _ in range(self._num_streams)]
        raise cannot_run("openvino", error, is_input=any(works)) from error

    def _answers_others(self, inputs: Arrays) -> bool:
        """Whether another number of these samples can be answered; runs take the streams of all instances in turn."""
        if not inputs:  # nothing was answered yet
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


class _Stack(ctypes.Structure):
    """`stack_t` of Linux, see sigaltstack(2)."""

    _fields_ = (("address", ctypes.c_void_p), ("flags", ctypes.c_int), ("num_bytes", ctypes.c_size_t))


@contextmanager
def signal_stack_kept() -> Iterator[None]:
    """Restore this thread's signal stack, or its absence, after the block."""
    if sys.platform != "linux":
        yield
        return
    library, before = ctypes.CDLL(None), _Stack()
    library.sigaltstack(None, ctypes.byref(before))
    try:
        yield
    finally:
        library.sigaltstack(ctypes.byref(before), None)


def withhold_telemetry() -> None:
    """Hide the telemetry package from OpenVINO and NNCF, which run without it; call before importing them."""
    modules: dict[str, Any] = sys.modules  # None stands for a package that cannot be imported
    modules.setdefault("openvino_telemetry", None)


def load_all(graph: Graph) -> tuple[OpenVino, ...]:
    """One engine for each instance of the graph.

    Raises:
        BadArtifact: OpenVINO is not installed or cannot load it, it has other inputs or outputs, or this CPU lacks the
            precision.
    """
    withhold_telemetry()
    try:
        import openvino  # noqa: PLC0415 - the engine is listed without its library
    except ImportError as error:
        raise not_installed("openvino") from error
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
        names = [spec.name for spec in graph.inputs]
        ranges = exact_ranges(model, names)
        lookups = bounded_lookups(model, openvino.opset13, names)
        settings = {
            # Always stated: on a CPU with bf16 the default computes fp32 graphs in bf16.
            "INFERENCE_PRECISION_HINT": hint,
            "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0",
            # A single stream of a single thread fails silently (see `OpenVino`); of two streams one is idle.
            "NUM_STREAMS": 2 if is_alone else graph.instances,
            "INFERENCE_NUM_THREADS": 2 if is_alone else graph.instances * graph.threads,
            # Two services on one machine would pin their threads to the same cores.
            "ENABLE_CPU_PINNING": False,
        }
        with signal_stack_kept():
            compiled = core.compile_model(model, "CPU", settings)
    except RuntimeError as error:
        raise cannot_load(graph.path, "openvino", error) from error
    # Where the CPU lacks bf16, OpenVINO takes f16 or f32, and reports it only here.
    computes_in = compiled.get_property("INFERENCE_PRECISION_HINT").get_type_name()
    if computes_in != hint:
        raise BadArtifact(
            f"{graph.path} is to be computed in {graph.precision}; OpenVINO computes in {computes_in} on this CPU",
            remedy="Serve another precision of this model here, or compress it again on this machine.",
        )
    for what, specs, ports in (("input", graph.inputs, compiled.inputs), ("output", graph.outputs, compiled.outputs)):
        known = {spec.name for spec in specs}
        datatypes: dict[str, str] = {}
        for port in ports:
            names, kind = port.get_names(), port.get_element_type().get_type_name()
            # Of a port with several names, only the manifest's counts.
            datatypes |= {name: _TYPES.get(kind, kind) for name in names if name in known or len(names) == 1}
        require_names(graph.path, what, specs, datatypes)
    return tuple(OpenVino(openvino, compiled, graph, lookups, ranges) for _ in range(graph.instances))


ENGINE = EngineRecord(
    name="openvino",
    load_all=load_all,
    platform="openvino",
    packages=("openvino",),
    suffixes=(".onnx", ".xml"),
    export_rank=1,
    reference_rank=2,
)
