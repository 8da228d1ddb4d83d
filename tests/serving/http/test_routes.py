from __future__ import annotations

import pytest

from stoker.serving.http import application as routes
from stoker.serving.http.application import Route, find
from stoker.serving.refusals import NotFound, Unsupported


@pytest.mark.parametrize(
    ("path", "route"),
    [
        ("/v2", Route("server")),
        ("/v2/", Route("server")),
        ("/v2/health/live", Route("live")),
        ("/v2/health/ready", Route("ready")),
        ("/v2/models", Route("models")),
        ("/v2/models/stats", Route("statistics")),
        ("/v2/models/m", Route("metadata", "m")),
        ("/v2/models/m/versions/3", Route("metadata", "m", "3")),
        ("/v2/models/m/ready", Route("model_ready", "m")),
        ("/v2/models/m/versions/3/ready", Route("model_ready", "m", "3")),
        ("/v2/models/m/config", Route("config", "m")),
        ("/v2/models/m/stats", Route("statistics", "m")),
        ("/v2/models/m/infer", Route("infer", "m")),
        ("/v2/models/m/versions/3/infer", Route("infer", "m", "3")),
        ("/v2/models/a%2Fb%20c/infer", Route("infer", "a/b c")),
        ("/v2/repository/index", Route("index")),
        ("/v2/repository/models/m/load", Route("load", "m")),
        ("/v2/repository/models/m/unload", Route("unload", "m")),
        ("/metrics", Route("metrics")),
    ],
)
def test_every_page_of_the_protocol_is_found(path: str, route: Route) -> None:
    """With and without a version; segments are unquoted one by one."""
    assert find(path) == route


@pytest.mark.parametrize(
    "path",
    [
        "",
        "/",
        "/v1",
        "/v2/model",
        "/v2/models/m/versions",
        "/v2/models//infer",
        "/v2/models/m/predict",
        "/v2/models/m/infer/x",
        "/v2/models/m/versions/3/x/y",
        "/v2/repository/models/m/reload",
        "/v2/health",
        "//v2",
    ],
)
def test_other_pages_are_not_there(path: str) -> None:
    """The message names the path."""
    with pytest.raises(NotFound, match="there is no page"):
        find(path)


@pytest.mark.parametrize(
    "path",
    [
        "/v2/systemsharedmemory/status",
        "/v2/cudasharedmemory/region/r/register",
        "/v2/trace/setting",
        "/v2/logging",
        "/v2/models/m/generate",
        "/v2/models/m/generate_stream",
        "/v2/models/m/trace/setting",
    ],
)
def test_extensions_that_are_not_had_are_known(path: str) -> None:
    """A client that calls one learns that it is not supported, not that it mistyped."""
    with pytest.raises(Unsupported):
        find(path)


def test_long_paths_are_found_and_not_remembered() -> None:
    """Requests for ever other long names do not fill the memory with them."""
    before = routes._known.cache_info().currsize
    assert find(f"/v2/models/{'m' * 300}/infer") == Route("infer", "m" * 300)
    assert routes._known.cache_info().currsize == before
