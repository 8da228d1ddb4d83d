"""The protocol over HTTP: a bare ASGI application, run by uvicorn with connections that are bounded."""
