"""Runs executed elsewhere: hosts, Slurm, Kubernetes, Ray, clouds; one seam, one file for each kind of place.

A file with an object `LAUNCHER` is a kind of place; the folder is listed, nothing else names them.
"""
