"""Draw the facts of a report as one HTML page."""
