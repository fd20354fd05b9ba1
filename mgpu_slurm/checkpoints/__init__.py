"""Checkpoints: written during training, complete or not at all, and readable by any number of ranks."""
