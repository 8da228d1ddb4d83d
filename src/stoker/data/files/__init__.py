"""Sources of samples in files: image folders, tables, shards, and Hugging Face datasets; each read by index."""
