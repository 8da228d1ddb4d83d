"""Any record, made from its own type hints."""

from __future__ import annotations

import dataclasses
import inspect
import types
import typing
from typing import Any, Literal, Union

from hypothesis import strategies as st

from stoker import records
from stoker.records.codec import JSON

FINITE = st.floats(allow_nan=False, allow_infinity=False)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | FINITE | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)

RECORDS = sorted(
    (item for item in vars(records).values() if inspect.isclass(item) and dataclasses.is_dataclass(item)),
    key=lambda record: record.__name__,
)
"""Every record class there is."""


def record_of(record: type) -> st.SearchStrategy[Any]:
    """Instances of `record` that it accepts itself."""
    special = {
        records.Estimate: _estimates,
        records.CleanList: _clean_lists,
        records.Plan: _plans,
        records.Coupling: _couplings,
        records.Layout: _layouts,
        records.SampledUpdates: _sampled_updates,
        records.ServiceSettings: _service_settings,
        records.StoredTensor: _stored_tensors,
    }
    if record in special:
        return special[record]()
    counts, names = st.integers(0, 2**63 - 1), st.text("abc.-", min_size=3, max_size=8)
    bounded: dict[type, dict[str, st.SearchStrategy[Any]]] = {
        records.Position: dict.fromkeys(("epoch", "cursor", "samples", "updates"), counts),
        records.FileDigest: {"name": names, "num_bytes": counts, "sha256": st.just("0f" * 32)},
        records.Run: dict.fromkeys(("total_samples", "samples", "updates"), counts),
    }
    hints, given = typing.get_type_hints(record), bounded.get(record, {})
    fields = (field.name for field in dataclasses.fields(record))
    return st.builds(record, **{name: given[name] if name in given else values_of(hints[name]) for name in fields})


def values_of(hint: Any) -> st.SearchStrategy[Any]:
    """Values of a field with this type hint."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is JSON:
        return JSON_VALUES
    if dataclasses.is_dataclass(hint):
        return record_of(hint)
    if origin is Literal:
        return st.sampled_from(arguments)
    if origin in (Union, types.UnionType):
        return st.one_of([values_of(choice) for choice in arguments])
    if origin is tuple and arguments[1:] == (...,):
        return st.lists(values_of(arguments[0]), max_size=3).map(tuple)
    if origin is tuple:
        return st.tuples(*map(values_of, arguments))
    if origin is dict:
        return st.dictionaries(TEXT, values_of(arguments[1]), max_size=3)
    simple = {str: TEXT, int: st.integers(), float: st.floats(allow_nan=False), bool: st.booleans()}
    return st.none() if hint is types.NoneType else simple[hint]


def _estimates() -> st.SearchStrategy[records.Estimate]:
    ends = st.lists(st.floats(allow_nan=False), min_size=3, max_size=3).map(sorted)
    bases = values_of(records.Basis)
    return st.builds(
        lambda three, unit, basis: records.Estimate(
            low=three[0], value=three[1], high=three[2], unit=unit, basis=basis
        ),
        ends,
        TEXT,
        bases,
    )


def _layouts() -> st.SearchStrategy[records.Layout]:
    counts = st.integers(1, 64)
    interleaved = st.builds(records.Layout, stages=st.integers(2, 64), chunks=st.integers(2, 8))
    return interleaved | st.builds(
        records.Layout,
        replicas=counts,
        shards=counts,
        tensor=counts,
        stages=counts,
        reshard=st.booleans(),
        sequence=st.booleans(),
        schedule=st.sampled_from(["1f1b", "gpipe"]),
    )


def _stored_tensors() -> st.SearchStrategy[records.StoredTensor]:
    """One piece that is all of it."""
    return st.builds(
        lambda shape, dtype, number: records.StoredTensor(
            shape=tuple(shape),
            dtype=dtype,
            pieces=(records.StoredPiece(file="a", offsets=(0,) * len(shape), sizes=tuple(shape), number=number),),
        ),
        st.lists(st.integers(0, 2**40), max_size=3),
        TEXT,
        st.integers(0, 9),
    )


def _sampled_updates() -> st.SearchStrategy[records.SampledUpdates]:
    """Columns of one length."""
    rows = st.lists(st.tuples(st.integers(), *[st.floats(allow_nan=False)] * 5), max_size=3)
    names = [field.name for field in dataclasses.fields(records.SampledUpdates)]
    return rows.map(
        lambda found: records.SampledUpdates(
            **{name: tuple(row[place] for row in found) for place, name in enumerate(names)}
        )
    )


def _plans() -> st.SearchStrategy[records.Plan]:
    return values_of(records.Precision).flatmap(_plans_in)


def _plans_in(precision: str) -> st.SearchStrategy[records.Plan]:
    shards = st.builds(records.Layout, shards=st.integers(1, 64))
    return st.builds(
        records.Plan,
        device=TEXT,
        micro_batch=st.integers(1, 512),
        precision=st.just(precision),
        checkpointed_blocks=st.integers(1, 100),
        checkpointing=st.sampled_from(["full", "selective"]),
        compile=st.booleans(),
        threads=st.integers(1, 64),
        malloc=st.sampled_from(["default", "mapped"]),
        loader=st.just("workers"),
        num_workers=st.integers(1, 8),
        prefetch_batches=st.integers(1, 4),
        checkpoint_every_s=st.floats(0.1, 1e6),
        layout=shards if precision == "fp8" else _layouts(),
    )


def _couplings() -> st.SearchStrategy[records.Coupling]:
    coupled = st.tuples(st.sampled_from(["batch_norm", "whole_group"]), st.integers(1, 600))
    return st.builds(
        lambda pair, causes, evidence: records.Coupling(
            kind=pair[0], group=pair[1], causes=tuple(causes), evidence=evidence
        ),
        st.just(("separable", None)) | coupled,
        st.lists(TEXT, max_size=2),
        TEXT,
    )


def _service_settings() -> st.SearchStrategy[records.ServiceSettings]:
    counts, few, seconds = st.integers(1, 65_536), st.integers(1, 1024), st.floats(0.001, 100)
    return st.builds(
        records.ServiceSettings,
        instances=st.none() | few,
        threads=st.none() | few,
        max_batch_rows=counts,
        max_delay_s=seconds,
        max_queue_rows=counts,
        max_queue_bytes=counts,
        max_caller_share=st.floats(0.001, 1),
        deadline_s=st.none() | seconds,
        buckets=st.lists(counts, max_size=3).map(tuple),
        versions=st.lists(counts, max_size=3).map(tuple),
        basis=TEXT,
    )


def _clean_lists() -> st.SearchStrategy[records.CleanList]:
    return st.builds(
        records.CleanList,
        source=TEXT,
        made_at=TEXT,
        kept=st.integers(0, 10**9),
        dropped=st.lists(record_of(records.Dropped), max_size=2).map(tuple),
    )
