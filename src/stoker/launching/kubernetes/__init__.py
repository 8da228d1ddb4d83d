"""Runs and services on Kubernetes, through its API: manifests, files in pods, states."""
