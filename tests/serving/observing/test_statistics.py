"""Statistics of the protocol."""

from __future__ import annotations

from typing import Any

from stoker.serving.batching.scheduler import Executed
from stoker.serving.metrics import Counters


def executed(**changes: Any) -> Executed:
    """A batch of two requests with three rows."""
    fields = {
        "instance": 0,
        "rows": 3,
        "requests": 2,
        "reason": "idle",
        "sizes": (),
        "elements": 3,
        "padding": 0,
        "queue_s": (0.001, 0.003),
        "input_s": 0.001,
        "infer_s": 0.010,
        "output_s": 0.002,
        "succeeded": True,
    }
    return Executed(**{**fields, **changes})


def test_a_request_counts_its_batch_in_full() -> None:
    """Clients divide by requests: each of two in a batch waited for all 10 ms of it, in perf_analyzer's units."""
    counters = Counters("digits", "1", wall_clock=lambda: 12.5)
    counters.add_batch(executed())
    for _ in range(2):
        counters.add_request(0.016, succeeded=True)
    found = counters.document()
    assert (found["inference_count"], found["execution_count"], found["last_inference"]) == (3, 1, 12500)
    stats = found["inference_stats"]
    assert set(stats) == {
        "success",
        "fail",
        "queue",
        "compute_input",
        "compute_infer",
        "compute_output",
        "cache_hit",
        "cache_miss",
    }
    assert stats["success"] == {"count": 2, "ns": 32_000_000}
    assert stats["queue"] == {"count": 2, "ns": 4_000_000}
    assert stats["compute_infer"] == {"count": 2, "ns": 20_000_000}
    assert found["batch_stats"] == [
        {
            "batch_size": 3,
            "compute_input": {"count": 1, "ns": 1_000_000},
            "compute_infer": {"count": 1, "ns": 10_000_000},
            "compute_output": {"count": 1, "ns": 2_000_000},
        }
    ]


def test_what_failed_counts_as_failed_alone() -> None:
    """A run that failed adds no rows; its requests are failures."""
    counters = Counters("digits", "1")
    counters.add_batch(executed(succeeded=False))
    counters.add_request(0.016, succeeded=False)
    found = counters.document()
    assert (found["inference_count"], found["execution_count"], found["batch_stats"]) == (0, 0, [])
    stats = found["inference_stats"]
    assert (stats["success"], stats["fail"]) == ({"count": 0, "ns": 0}, {"count": 1, "ns": 16_000_000})


def test_batches_are_told_by_their_rows() -> None:
    """Sizes in order, each with its number of executions."""
    counters = Counters("digits", "1")
    for rows in (8, 1, 8):
        counters.add_batch(executed(rows=rows))
    batches = counters.document()["batch_stats"]
    assert [(one["batch_size"], one["compute_infer"]["count"]) for one in batches] == [(1, 1), (8, 2)]
