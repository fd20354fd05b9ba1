"""What a run uses of its nodes, sampled while it runs."""
