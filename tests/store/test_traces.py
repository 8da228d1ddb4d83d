from __future__ import annotations

import dataclasses
import gzip
import json

import pytest

from stoker.errors import RunFailed
from stoker.records.trace import (
    Occurrence,
    Operation,
    Repetition,
    Segment,
    Storage,
    TensorShape,
    Trace,
    TraceSettings,
    Widened,
)
from stoker.store import trace_cache
from stoker.store.record_caches import packed_trace, unpacked_trace

X = TensorShape(shape=(4, 8), dtype="bf16")
W = TensorShape(shape=(8, 8), dtype="fp32")
MM = Operation(
    name="mm",
    inputs=(X, W),
    outputs=(X,),
    flops=512,
    bytes_read=320,
    bytes_written=64,
    attributes=(("stride", [2, 2]), ("transpose_a", False)),
)
ADD = Operation(name="_foreach_add_", inputs=(W, W), outputs=(W,), flops=0, bytes_read=512, bytes_written=256)
TRACE = Trace(
    settings=TraceSettings(target="cuda", capability="8.9", micro_batch=4, precision="bf16"),
    operations=(MM, ADD),
    occurrences=(
        Occurrence(operation=0, phase="forward", part=0, module=1, source=0),
        Occurrence(operation=1, phase="optimizer", part=0, module=0, source=1),
    ),
    storages=(
        Storage(num_bytes=256, category="parameter", born=-1, died=None, block=2),
        Storage(num_bytes=2**41, category="activation", born=0, died=1, compiled_share=0.5),
    ),
    events=(1, 2, -2),
    modules=("", "layers.0"),
    sources=("", "träin_me.py:42"),
    repetition=Repetition(
        module="layers",
        num_blocks=9,
        traced=4,
        segments=(Segment(block=0, start=0, stop=1),),
        copies=((1, 5),),
        widened=(Widened(occurrence=1, operation=ADD),),
        grown=((1, 2**42),),
    ),
    took_s=0.25,
)
EMPTY = dataclasses.replace(
    TRACE, operations=(), occurrences=(), storages=(), events=(), repetition=None, is_fallback=True
)


@pytest.mark.parametrize("trace", [TRACE, EMPTY, dataclasses.replace(TRACE, repetition=None)])
def test_what_is_read_is_what_was_written(tmp_path, trace):
    """Every field of every part survives, also where there is nothing to survive."""
    cache = trace_cache(tmp_path)
    cache.write(trace, "job")
    assert cache.read("job") == trace


def test_the_layout_is_columns(tmp_path):
    """What a file holds, spelled out: a change of it needs another number of the layout."""
    content = json.loads(gzip.decompress(packed_trace(TRACE)))
    assert content["layout"] == 3
    assert content["shapes"] == [["bf16", [4, 8]], ["fp32", [8, 8]]]
    assert content["operations"][0] == ["mm", [0, 1], [0], 512, 320, 64, [["stride", [2, 2]], ["transpose_a", False]]]
    assert content["occurrences"] == {
        "operation": [0, 1],
        "phase": ["forward", "optimizer"],
        "part": [0, 0],
        "module": [1, 0],
        "source": [0, 1],
    }
    assert content["storages"] == {
        "num_bytes": [256, 2**41],
        "category": ["parameter", "activation"],
        "born": [-1, 0],
        "died": [None, 1],
        "block": [2, None],
        "compiled_share": [1.0, 0.5],
    }
    assert content["repetition"]["segments"] == {"block": [0], "start": [0], "stop": [1]}
    assert content["repetition"]["widened"] == [[1, ["_foreach_add_", [1, 1], [1], 0, 512, 256, []]]]


def test_the_same_trace_gives_the_same_bytes():
    """Nothing in a file depends on when it is written."""
    assert packed_trace(TRACE) == packed_trace(TRACE)


def test_another_key_has_another_trace(tmp_path):
    """Keys are distinguished, and what was written last under one counts."""
    cache = trace_cache(tmp_path)
    cache.write(EMPTY, "a")
    cache.write(TRACE, "b")
    cache.write(TRACE, "a")
    assert (cache.read("a"), cache.read("b"), cache.read("c")) == (TRACE, TRACE, None)


def test_damaged_files_are_passed_over(tmp_path):
    """A file cut anywhere, of another version or of something else is as good as none."""
    whole = packed_trace(TRACE)
    content = json.loads(gzip.decompress(whole))
    damaged = [whole[:cut] for cut in range(0, len(whole), 23)]
    damaged += [
        gzip.compress(json.dumps(other).encode())
        for other in (
            [],
            {},
            content | {"layout": 0},
            content | {"schema": 99},
            content | {"occurrences": content["occurrences"] | {"phase": []}},
            content | {"occurrences": {"phase": []}},
            content | {"shapes": []},
            content | {"storages": 5},
            content | {"settings": {}},
            content | {"occurrences": [[0, 1], [0, 0]]},
            content | {"events": None},
        )
    ]
    cache = trace_cache(tmp_path)
    cache.write(TRACE, "job")
    (path,) = (tmp_path / "traces").iterdir()
    for data in [*damaged, b"not compressed"]:
        path.write_bytes(data)
        assert cache.read("job") is None
        with pytest.raises(ValueError):  # noqa: PT011 - what is wrong depends on where the damage is
            unpacked_trace(data)


def test_a_cache_that_cannot_be_written_says_so(tmp_path):
    """A file where the directory should be is reported with its path."""
    (tmp_path / "traces").write_text("in the way")
    with pytest.raises(RunFailed, match="traces"):
        trace_cache(tmp_path).write(TRACE, "job")
