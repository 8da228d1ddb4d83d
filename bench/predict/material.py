"""Models of a few numbers and files of rows for them, some bad, made from a seed."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from stoker.testing.tiny_models import tiny_artifact

CASES = ("parquet", "csv", "jsonl")


def make(case: str, folder: Path, rows: int) -> tuple[Path, Path]:
    """A model's directory and a file of rows for it.

    `parquet` and `csv`: eight numbers a row; `jsonl`: 1 to 64 tokens a row. One row in a hundred is bad.
    """
    draw, path = np.random.default_rng(0), folder / f"in.{case}"
    bad = set(random.Random(0).sample(range(rows), rows // 100))
    if case == "jsonl":
        with path.open("w") as file:
            for row, size in enumerate(draw.integers(1, 65, rows).tolist()):
                ids = [] if row in bad else draw.integers(1, 16, size).tolist()
                file.write(json.dumps({"input_ids": ids, "attention_mask": [1] * size}) + "\n")
        return tiny_artifact(folder, name="tokens", kind="tokens", engine="openvino").path.parent, path
    values = draw.standard_normal((rows, 8), dtype=np.float32)
    values[sorted(bad), 3] = np.nan
    if case == "csv":
        np.savetxt(path, values, "%.9g", ",", header=",".join(f"x{n}" for n in range(8)), comments="")
    else:
        vectors = pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1)), 8)
        pq.write_table(pa.table({"x": vectors}), path, row_group_size=10_000)
    return tiny_artifact(folder, name="mlp").path.parent, path
