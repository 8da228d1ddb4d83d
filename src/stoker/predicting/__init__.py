"""Offline batches: many rows from files through a model into Parquet, resumable."""

from importlib.util import find_spec

from stoker.errors import BadJob

for _module in ("pyarrow", "PIL"):
    if find_spec(_module) is None:
        raise BadJob(f"{_module} is not installed", remedy="pip install 'stoker[predict]'")
