"""Rows of tables and pixels of images as files hold them, each with its place, and its fault where it has one.

Training, `stoker data check` and `stoker predict` read through these, so that what one of them finds in a file the
others find too, at the same row.
"""
