"""What one step does: its facts, trials on the device, and what the device really reaches."""
