"""The trackers, each by its own library, which is imported when a run is sent."""
