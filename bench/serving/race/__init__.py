"""Stoker against other model servers with the same engine, and against FastAPI with eager PyTorch."""
