"""Show runs while they run: `status`, the log that is followed, and its progress line."""
