"""Measurements on this machine, and their records."""
