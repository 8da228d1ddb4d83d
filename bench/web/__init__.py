"""Measurements of `stoker ui`, and the folders of runs that they show."""
