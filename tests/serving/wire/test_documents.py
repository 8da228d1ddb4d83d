from __future__ import annotations

from stoker.serving import protocol
from stoker.serving.service import BatchTotal, ModelStatistics, RepositoryEntry, Total
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


def test_statistics_have_the_extensions_fields() -> None:
    """Names and units are what perf_analyzer reads: counts, nanoseconds, milliseconds since 1970."""
    total = Total(count=2, ns=3000)
    one = ModelStatistics(
        name="m", version="1", last_inference_ms=5, inference_count=8, execution_count=2, success=total,
        batches=(BatchTotal(batch_size=4, compute_infer=total),),
    )  # fmt: skip
    (told,) = protocol.statistics_document([one])["model_stats"]
    assert (told["last_inference"], told["inference_count"], told["execution_count"]) == (5, 8, 2)
    assert told["inference_stats"]["success"] == {"count": 2, "ns": 3000}
    assert set(told["inference_stats"]) == {
        "success", "fail", "queue", "compute_input", "compute_infer", "compute_output", "cache_hit", "cache_miss",
    }  # fmt: skip
    assert told["batch_stats"][0]["batch_size"] == 4
    assert told["batch_stats"][0]["compute_infer"] == {"count": 2, "ns": 3000}


def test_the_index_tells_why() -> None:
    """State and reason of every version."""
    entry = RepositoryEntry(name="m", version="2", state="UNAVAILABLE", reason="its golden check failed")
    assert protocol.index_document([entry]) == [
        {"name": "m", "version": "2", "state": "UNAVAILABLE", "reason": "its golden check failed"}
    ]
