"""The contract of every kind of place: tests for a launcher, to be inherited by a class of a test file.

```python
class TestSsh(LauncherConformance):
    launcher = LAUNCHER
    words = {"box": (1, 1, ""), "a,b/2xcpu": (2, 2, "cpu")}
    bad_words = ("", "box/0xcpu")
    environments = [{"STOKER_HOST": "0", "STOKER_HOSTS": "1"}]
```
A class that can reach a real or a fake place also defines `place`, and then its runs are started, followed, stopped and
fetched there.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, ClassVar

from stoker.errors import NoDevice, PlaceUnreachable
from stoker.launching import kinds, launcher_of
from stoker.launching.bundle import Bundle, TreeFile
from stoker.launching.launcher import Launcher, Submission
from stoker.records import ENDED

_SECRET = "STOKER_CONFORMANCE_SECRET"  # noqa: S105 - the name of it


class LauncherConformance:
    """Tests that hold for every launcher; pytest runs the methods of a class that inherits them.

    Attributes:
        launcher: the launcher.
        words: what its words mean, without the kind: number of nodes, devices on each, device.
        bad_words: words that cannot be read.
        environments: variables that its scheduler sets on hosts of a run.
        unreachable: a handle of a run at a place that does not answer; None if there is none to make.
        client: modules that are the launcher's client library, and must not be imported at the place.
    """

    launcher: ClassVar[Launcher]
    words: ClassVar[Mapping[str, tuple[int, int, str]]]
    bad_words: ClassVar[Sequence[str]]
    environments: ClassVar[Sequence[Mapping[str, str]]]
    unreachable: ClassVar[dict[str, Any] | None] = None
    client: ClassVar[Sequence[str]] = ()

    def submission(self, word: str, **changes: Any) -> Submission:
        """A submission of a job of three lines to the place of a word."""
        job = TreeFile.of_bytes("job.py", b"def job():\n    ...\n")
        code = Bundle(kind="code", name="job.py", files=(job,))
        stoker = Bundle(kind="stoker", name="Stoker", files=(TreeFile.of_bytes("stoker/__init__.py", b""),))
        settings: dict[str, Any] = {
            "run": "conforming-1a2b3c",
            "target": self.launcher.parse(word),
            "code": code,
            "stoker": stoker,
            "job_file": "job.py",
            "arguments": ("--set", "lr=0.1"),
            "environment": "/opt/stoker/bin/python",
            "secrets": (_SECRET,),
        }
        return Submission(**settings | changes)

    def test_it_is_found_by_its_kind(self) -> None:
        """The folder is listed: the kind in the file's text is the object's."""
        assert self.launcher.kind in kinds()
        assert launcher_of(self.launcher.kind) is self.launcher

    def test_words_have_the_shapes_they_say(self) -> None:
        """A word's target has its nodes and devices, and its text is the whole word again."""
        for word, shape in self.words.items():
            target = self.launcher.parse(word)
            assert (target.num_nodes, target.devices_each, target.device) == shape, word
            assert target.kind == self.launcher.kind
            assert self.launcher.parse(target.text.partition(":")[2]) == target, word

    def test_bad_words_are_refused_with_the_form(self) -> None:
        """An unreadable word is refused before any request, and the remedy shows the form."""
        for word in self.bad_words:
            problem = self._problem_of(word)
            assert problem is not None, f"{word!r} was read"
            assert self.launcher.kind in f"{problem.message} {problem.remedy}", word

    def _problem_of(self, word: str) -> NoDevice | None:
        try:
            self.launcher.parse(word)
        except NoDevice as problem:
            return problem
        return None

    def test_the_script_can_be_read_and_holds_no_secret(self, monkeypatch: Any) -> None:
        """People see the run, the job file and its settings; of a secret only the name, if that."""
        monkeypatch.setenv(_SECRET, "hunter2-hunter2")
        for word in self.words:
            text = self.launcher.script(self.submission(word))
            assert "conforming-1a2b3c" in text
            assert "job.py" in text
            assert "lr=0.1" in text
            assert "hunter2" not in text

    def test_the_script_is_the_same_again(self) -> None:
        """A kept script can be compared with the next: nothing in it is random or of the moment."""
        for word in self.words:
            assert self.launcher.script(self.submission(word)) == self.launcher.script(self.submission(word))

    def test_ranks_are_numbered_host_after_host(self) -> None:
        """At the place each host knows its number, and how host 0 is reached if there are others."""
        for environ in self.environments:
            ranks = self.launcher.ranks(environ)
            assert 0 <= ranks.host < ranks.num_hosts
            if ranks.num_hosts > 1:
                assert ranks.master
                assert 0 < ranks.port < 65536

    def test_at_the_place_neither_torch_nor_the_client_is_imported(self) -> None:
        """A place answers at once, and needs no more than Python to start a run."""
        module = type(self.launcher).__module__
        program = f"import sys, {module}; print([m for m in {['torch', 'numpy', *self.client]!r} if m in sys.modules])"
        said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
        assert said.strip() == "[]"

    def test_silence_is_not_an_end(self) -> None:
        """A place that does not answer makes a run unknown, never ended: nothing may act on it."""
        if self.unreachable is None:
            return
        try:
            state = self.launcher.state(self.unreachable)
        except PlaceUnreachable:
            return
        assert state.phase == "unknown"
        assert state.phase not in ENDED
        assert state.evidence or state.why


class LiveLauncherConformance:
    """Tests of a launcher at a place that answers; `place` gives it, `until` waits for it."""

    launcher: ClassVar[Launcher]

    def place(self, folder: Path) -> AbstractContextManager[Submission]:
        """A place, and the submission of a run there that takes at least some seconds and saves when it is asked."""
        raise NotImplementedError

    def until(self, handle: dict[str, Any], *phases: str) -> Iterator[Any]:
        """States of the run as they come, up to one of `phases`."""
        raise NotImplementedError

    def test_a_run_starts_is_followed_stops_and_comes_home(self, tmp_path: Path) -> None:
        """The whole life at a place: one stream by offset, a stop that saves, a directory that comes home."""
        with self.place(tmp_path) as submission:
            lines: list[str] = []
            handle = self.launcher.start(submission, lines.append)
            assert json.loads(json.dumps(handle)) == handle
            again = self.launcher.start(submission, lines.append)
            assert {**again, "sent_bytes": 0} == {**handle, "sent_bytes": 0}, "a run that is going on was started twice"
            log, phase = b"", ""
            for state in self.until(handle, "running", *ENDED):
                log, phase = log + self.launcher.events(handle, len(log)), state.phase
            assert phase == "running"
            assert self.launcher.events(handle, 0).startswith(log)
            self.launcher.stop(handle)
            states = list(self.until(handle, *ENDED))
            assert states[-1].phase == "stopped", states[-1]
            self.launcher.fetch(handle, tmp_path / "home")
            assert (tmp_path / "home" / "events.jsonl").read_bytes() == self.launcher.events(handle, 0)
            assert (tmp_path / "home" / "run.json").exists()
