"""Find out about the user's project: its job, config, code snapshot and environment."""
