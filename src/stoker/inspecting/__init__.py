"""What is wrong with a data set: read once or twice, never changed."""

from importlib.util import find_spec

from stoker.errors import BadJob

for _module in ("pyarrow", "PIL"):
    if find_spec(_module) is None:
        raise BadJob(f"{_module} is not installed", remedy="pip install 'stoker[data]'")

from stoker.inspecting.data_kinds import check  # noqa: E402 - likewise
from stoker.inspecting.findings import (  # noqa: E402 - after what they need is known to be there
    Checked,
    CheckOptions,
    Tell,
    clean_list,
)

__all__ = ["CheckOptions", "Checked", "Tell", "check", "clean_list"]
