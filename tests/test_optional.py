from __future__ import annotations

import subprocess
import sys

import pytest

from tests.optional import optional

ON_USE = """
import sys
from tests.optional import optional
library = optional("colorsys")
hasattr(library, "__wrapped__")
hasattr(library, "_mock_name")
print("colorsys" in sys.modules, library.rgb_to_hsv(1.0, 0.0, 0.0), "colorsys" in sys.modules)
"""


def test_a_library_is_imported_when_it_is_used() -> None:
    """Not when it is named, nor when collecting asks whether it wraps something, or is a mock."""
    done = subprocess.run([sys.executable, "-c", ON_USE], capture_output=True, text=True, check=True)
    assert done.stdout == "False (0.0, 1.0, 1.0) True\n"


def test_tests_of_a_library_that_is_missing_are_skipped() -> None:
    """The whole file, with the name of what is missing."""
    with pytest.raises(pytest.skip.Exception, match="no_such_library is not installed") as skipped:
        optional("no_such_library.part")
    assert skipped.value.allow_module_level


def test_what_a_library_lacks_is_an_attribute_error() -> None:
    """As of the module itself."""
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = optional("colorsys").no_such_name
