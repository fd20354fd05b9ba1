"""Share a model over the ranks of a run: the device mesh, and one module per strategy."""
