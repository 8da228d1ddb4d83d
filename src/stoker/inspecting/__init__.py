"""`stoker data check`: faults of a data set, which is read once or twice and never changed."""

from importlib.util import find_spec

from stoker.errors import BadJob

for _module in ("pyarrow", "PIL"):
    if find_spec(_module) is None:
        raise BadJob(f"{_module} is not installed", remedy="pip install 'stoker[data]'")

from stoker.inspecting.data_check import check  # noqa: E402 - after the check for what it needs
from stoker.inspecting.findings import Checked, CheckOptions, Tell, clean_list  # noqa: E402 - likewise

__all__ = ["CheckOptions", "Checked", "Tell", "check", "clean_list"]
