"""Serving exported models: a repository, a batcher, and the Open Inference Protocol over HTTP and gRPC."""
