"""Runs of one recipe that belong together: the same settings with several seeds, and several settings."""
