"""Make a report: gather the facts of runs and sweeps, and draw them as one HTML page."""
