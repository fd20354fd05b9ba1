"""Take the state of a training, also of sharded models, and restore it."""
