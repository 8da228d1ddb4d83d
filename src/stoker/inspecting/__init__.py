"""What is wrong with a data set: read once or twice, never changed."""

from importlib.util import find_spec

from stoker.errors import BadJob

for _module in ("pyarrow", "PIL"):
    if find_spec(_module) is None:
        raise BadJob(f"{_module} is not installed", remedy="pip install 'stoker[data]'")

from stoker.inspecting.checked import Checked, Tell, clean_list  # noqa: E402 - after what they need is known to be there
from stoker.inspecting.checking import check  # noqa: E402 - likewise
from stoker.inspecting.options import CheckOptions  # noqa: E402 - likewise

__all__ = ["CheckOptions", "Checked", "Tell", "check", "clean_list"]
