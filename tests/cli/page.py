"""A terminal for tests, of a given width and without colours."""

import io

from rich.console import Console


class Page(Console):
    """What is printed on it is its `text`."""

    def __init__(self, width: int = 120) -> None:
        self._stream = io.StringIO()
        super().__init__(file=self._stream, width=width, color_system=None)

    @property
    def text(self) -> str:
        """Everything that was printed."""
        return self._stream.getvalue()
