"""In which form a caller of REST wants its outputs: as binary data behind the JSON, or in it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from stoker.records import Manifest
from stoker.serving.problems import BadRequest
from stoker.serving.service import Request
from stoker.serving.wire.json_data import BINARY_ONLY


@dataclass(frozen=True, kw_only=True)
class Form:
    """`binary` holds for all outputs (`binary_data_output`), `outputs` for those named in it (`binary_data`)."""

    binary: bool = False
    outputs: Mapping[str, bool] = field(default_factory=dict)

    def is_binary(self, output: str) -> bool:
        """Whether this output goes behind the JSON."""
        return self.outputs.get(output, self.binary)


def check_form(form: Form, request: Request, manifest: Manifest) -> None:
    """See, before anything is computed, that JSON can carry what is wanted in it.

    Raises:
        BadRequest: an FP16 or BF16 output is wanted as JSON.
    """
    if form.binary and not form.outputs:
        return
    wanted = {one.name: one.classification for one in request.outputs}
    for spec in manifest.outputs:
        if spec.datatype not in BINARY_ONLY or form.is_binary(spec.name):
            continue
        if not wanted or wanted.get(spec.name) == 0:
            raise BadRequest(
                f"output {spec.name!r} of {manifest.name!r} is {spec.datatype}, which JSON does not carry; ask for it "
                "with the parameter binary_data, or for all with binary_data_output"
            )
