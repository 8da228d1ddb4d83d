"""Stoker beside other model servers with the same engine, and beside FastAPI with eager PyTorch."""
