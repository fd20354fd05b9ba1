"""Read what runs have reported, and average it over seeds."""
