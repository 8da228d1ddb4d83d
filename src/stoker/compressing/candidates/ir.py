"""OpenVINO's own format, as small as it gets.

A small network's description (`model.xml`) takes a fifth of its weights in int8: layers' names, sizes that follow from
others, notes of the tools, indentation. The engine needs none of it.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

from stoker.compressing.candidates.base import CannotMake, Made
from stoker.engines import telemetry

_ENDS = frozenset({"Parameter", "Result"})


def openvino() -> Any:
    """The library.

    Raises:
        CannotMake: it is not installed.
    """
    telemetry.withhold()
    try:
        import openvino as library  # noqa: PLC0415 - an extra, which is loaded where it is used
        import openvino.passes  # noqa: PLC0415 - likewise; not loaded with the rest
    except ImportError as error:
        raise CannotMake("openvino is not installed", remedy="pip install 'stoker[compress]'") from error
    return library


def read(path: Path) -> Any:
    """A graph in memory, with what follows from constants alone computed once and for all."""
    library = openvino()
    model = library.Core().read_model(path)
    passes = library.passes.Manager()
    passes.register_pass(library.passes.ConstantFolding())
    passes.run_passes(model)
    return model


def saved(model: Any, directory: Path, *, halve: bool = False) -> Made:
    """Write `model.xml` and `model.bin`, with weights in fp16 if they are to be halved."""
    path = directory / "model.xml"
    openvino().save_model(model, path, compress_to_fp16=halve)
    ends = {name for port in (*model.inputs, *model.outputs) for name in port.get_names()}
    path.write_text(slimmed(path.read_text(encoding="utf-8"), ends), encoding="utf-8")
    return Made(path, (path, path.with_suffix(".bin")))


def slimmed(xml: str, ends: Collection[str]) -> str:
    """The description without what the engine works out for itself; names of inputs and outputs, `ends`, stay."""
    net = ET.fromstring(xml)  # noqa: S314 - a graph of our own, or of an artifact that was verified
    for layer in net.iterfind("layers/layer"):
        if layer.get("type") not in _ENDS:
            layer.set("name", layer.get("id", ""))
        for port in layer.iterfind("input/port"):
            for dim in list(port):
                port.remove(dim)
        for port in layer.iterfind("output/port"):
            kept = [name for name in port.get("names", "").split(",") if name in ends]
            port.attrib.pop("names", None)
            if kept:
                port.set("names", ",".join(kept))
    for note in net.findall("rt_info"):
        net.remove(note)
    for element in net.iter():
        element.tail = None
        if element.text is not None and not element.text.strip():
            element.text = None
    return ET.tostring(net, encoding="unicode")
