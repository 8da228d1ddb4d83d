"""Metrics as Prometheus reads them."""

from __future__ import annotations

from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from stoker.serving.batching.scheduler import Executed
from stoker.serving.metrics import MOST_RETIRED, Metrics


def executed(**changes: Any) -> Executed:
    """A padded batch of two requests."""
    fields = {
        "instance": 0,
        "rows": 3,
        "requests": 2,
        "reason": "full",
        "sizes": (16,),
        "elements": 36,
        "padding": 12,
        "queue_s": (0.001, 0.003),
        "input_s": 0.001,
        "infer_s": 0.010,
        "output_s": 0.002,
        "succeeded": True,
    }
    return Executed(**{**fields, **changes})


def series(metrics: Metrics) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
    """Every sample by name and labels, read by Prometheus' own parser."""
    found: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
    for family in text_string_to_metric_families(metrics.document()[0].decode()):
        for sample in family.samples:
            found.setdefault(sample.name, {})[tuple(sorted(sample.labels.items()))] = sample.value
    return found


def test_a_batch_and_its_requests() -> None:
    """Each histogram counts what it is named for."""
    metrics = Metrics()
    version = metrics.version("digits", "1")
    version.batch(executed())
    for outcome in ("ok", "ok", "would_be_late"):
        version.request(outcome, 0.02)
    found, place = series(metrics), (("model", "digits"), ("version", "1"))
    assert found["stoker_batch_rows_sum"][place] == 3
    assert found["stoker_queue_seconds_count"][place] == 2
    assert found["stoker_padding_waste_ratio_sum"][place] == 0.25
    assert found["stoker_compute_seconds_sum"][("model", "digits"), ("outcome", "ok"), ("version", "1")] == 0.013
    assert found["stoker_batch_cut_reason_total"][("model", "digits"), ("reason", "full"), ("version", "1")] == 1
    totals = {dict(labels)["outcome"]: value for labels, value in found["stoker_total_seconds_count"].items()}
    assert totals == {"ok": 2, "would_be_late": 1}


def test_samples_of_fixed_shape_waste_nothing() -> None:
    """A model that is never padded has no observations of waste."""
    metrics = Metrics()
    metrics.version("digits", "1").batch(executed(sizes=(), padding=0))
    assert series(metrics)["stoker_padding_waste_ratio_count"][("model", "digits"), ("version", "1")] == 0


def test_versions_that_are_gone_for_long_lose_their_series() -> None:
    """However many versions come and go, the page stays bounded; the newest ones can still be read."""
    metrics = Metrics()
    sizes = []
    for number in range(3 * MOST_RETIRED):
        version = metrics.version("digits", str(number))
        version.batch(executed())
        version.request("ok", 0.01)
        version.release()
        sizes.append(len(metrics.document()[0]))
    kept = {dict(labels)["version"] for labels in series(metrics)["stoker_batch_rows_count"]}
    assert kept == {str(number) for number in range(2 * MOST_RETIRED, 3 * MOST_RETIRED)}
    assert sizes[-1] < 1.1 * sizes[MOST_RETIRED]


def test_a_version_that_is_loaded_again_goes_on() -> None:
    """A reload of the same version continues its series, also while both are in memory; others do not evict it."""
    metrics = Metrics()
    first, second = metrics.version("digits", "1"), metrics.version("digits", "1")
    first.request("ok", 0.01)
    first.release()
    second.request("ok", 0.01)
    for number in range(2, 4 + MOST_RETIRED):
        metrics.version("digits", str(number)).release()
    second.request("ok", 0.01)
    labels = (("model", "digits"), ("outcome", "ok"), ("version", "1"))
    assert series(metrics)["stoker_total_seconds_count"][labels] == 3


def test_what_is_live_is_read_when_somebody_looks() -> None:
    """Rows that wait, readiness, and what serves: digest, engine, precision."""
    metrics = Metrics()
    facts = {"model": "digits", "version": "2", "digest": "abc", "engine": "openvino", "precision": "bf16"}
    served = [(facts, 7, True)]
    metrics.watch(lambda: served)
    found, place = series(metrics), (("model", "digits"), ("version", "2"))
    assert found["stoker_model_info"] == {tuple(sorted(facts.items())): 1}
    assert (found["stoker_queue_rows"][place], found["stoker_model_ready"][place]) == (7, 1)
    served.clear()
    assert "stoker_model_info" not in series(metrics)
