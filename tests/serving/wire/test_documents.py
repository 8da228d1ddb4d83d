from __future__ import annotations

from stoker.serving import protocol
from stoker.serving.service import RepositoryEntry
from tests.serving.fakes import DIGITS


def test_a_dimension_that_varies_is_minus_one() -> None:
    """A model's metadata as the protocol has them."""
    told = protocol.model_metadata("digits", DIGITS, ("1", "2"))
    assert told["inputs"] == [{"name": "image", "datatype": "FP32", "shape": [-1, 8, 8]}]
    assert told["versions"] == ["1", "2"]
    assert told["platform"] == "onnxruntime_onnx"


def test_the_repository_is_announced_where_it_is() -> None:
    """Clients look at the list of extensions."""
    assert "model_repository" in protocol.server_metadata(name="s", version="1", is_admin=True)["extensions"]
    assert "model_repository" not in protocol.server_metadata(name="s", version="1", is_admin=False)["extensions"]


def test_the_index_tells_why() -> None:
    """State and reason of every version."""
    entry = RepositoryEntry(name="m", version="2", state="UNAVAILABLE", reason="its golden check failed")
    assert protocol.index_document([entry]) == [
        {"name": "m", "version": "2", "state": "UNAVAILABLE", "reason": "its golden check failed"}
    ]
