"""Know what a batch is, weigh its samples over all ranks, and cut it into parts."""
