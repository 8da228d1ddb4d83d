"""Routes: the page, model and version that a path names."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal
from urllib.parse import unquote

from stoker.serving.refusals import NotFound, Unsupported, shortened

Page = Literal[
    "server", "live", "ready", "models", "all_statistics", "metadata", "model_ready", "config", "statistics", "infer",
    "index", "load", "unload", "metrics",
]  # fmt: skip
Method = Literal["GET", "POST"]

POSTED: frozenset[Page] = frozenset({"infer", "index", "load", "unload"})
ADMIN: frozenset[Page] = frozenset({"index", "load", "unload", "metrics"})
WITHOUT_KEY: frozenset[Page] = frozenset({"live", "ready", "model_ready"})
"""An orchestrator's probes have no key."""

_PAGES: dict[tuple[str, ...], Page] = {
    ("v2",): "server",
    ("v2", "health", "live"): "live",
    ("v2", "health", "ready"): "ready",
    ("v2", "models"): "models",
    ("v2", "models", "stats"): "all_statistics",
    ("v2", "repository", "index"): "index",
    ("metrics",): "metrics",
}
_OF_A_MODEL: dict[str, Page] = {
    "": "metadata", "ready": "model_ready", "config": "config", "stats": "statistics", "infer": "infer",
}  # fmt: skip
_OF_THE_REPOSITORY: dict[str, Page] = {"load": "load", "unload": "unload"}
_UNSUPPORTED_OF_A_MODEL = frozenset({"generate", "generate_stream", "trace"})
_MOST_KNOWN_CHARS = 256
"""Longer paths are not cached: they are no model's, and many of them would fill the memory."""
_UNSUPPORTED = frozenset({"trace", "logging", "systemsharedmemory", "cudasharedmemory"})


@dataclass(frozen=True)
class Route:
    """A page and its model; an empty `version` is the default one."""

    page: Page
    model: str = ""
    version: str = ""

    @property
    def method(self) -> Method:
        """The page's HTTP method; HEAD is treated as GET."""
        return "POST" if self.page in POSTED else "GET"


def find(path: str) -> Route:
    """The page at a percent-quoted path; segments are unquoted one by one.

    Raises:
        NotFound: there is none.
        Unsupported: the protocol has it, this server does not.
    """
    return _known(path) if len(path) <= _MOST_KNOWN_CHARS else _find(path)


def _find(path: str) -> Route:
    segments = tuple(unquote(part) for part in path.removesuffix("/").split("/")[1:])
    if page := _PAGES.get(segments):
        return Route(page)
    match segments:
        case ("v2", "models", model, "versions", version, *action) if model and version:
            return _of_a_model(path, model, version, action)
        case ("v2", "models", model, *action) if model:
            return _of_a_model(path, model, "", action)
        case ("v2", "repository", "models", model, action) if model and action in _OF_THE_REPOSITORY:
            return Route(_OF_THE_REPOSITORY[action], model)
        case ("v2", extension, *_) if extension in _UNSUPPORTED:
            raise Unsupported(f"this server does not have the extension at {shortened(path)}")
    raise NotFound(f"there is no page {shortened(path)}; the protocol's begin at /v2")


_known = lru_cache(maxsize=1024)(_find)


def _of_a_model(path: str, model: str, version: str, action: list[str]) -> Route:
    if len(action) <= 1 and (page := _OF_A_MODEL.get("".join(action))):
        return Route(page, model, version)
    if action and action[0] in _UNSUPPORTED_OF_A_MODEL:
        raise Unsupported(f"this server does not have the extension at {shortened(path)}")
    raise NotFound(f"there is no page {shortened(path)}; of a model there are ready, config, stats and infer")
