"""The protocol over HTTP: a bare ASGI application, run by uvicorn with connections that are bounded."""

from stoker.serving.http.application import Application
from stoker.serving.http.connection import uvicorn_config

__all__ = ["Application", "uvicorn_config"]
