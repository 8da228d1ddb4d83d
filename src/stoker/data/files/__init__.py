"""Samples that lie in files: image folders, tables, shards, and datasets of Hugging Face; each fetched by its index."""
