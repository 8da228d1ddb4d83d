"""Order, batches, workers, and transforms on the device."""
