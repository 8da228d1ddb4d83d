"""Models of other libraries: each test is skipped where its library is missing."""

from __future__ import annotations

import os

os.environ.setdefault("KERAS_BACKEND", "torch")  # before Keras is imported by anything
