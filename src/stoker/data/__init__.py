"""Data sources that load nothing until their samples are asked for; torch is imported then as well."""

from stoker.data.arrays import ArraySource, Field
from stoker.data.choosing import images
from stoker.data.fashion import fashion_mnist
from stoker.data.handwritten import digits
from stoker.data.stdlib_text import python_source

__all__ = ["ArraySource", "Field", "digits", "fashion_mnist", "images", "python_source"]
