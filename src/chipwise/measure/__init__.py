"""Measurements on this machine, and the records they leave."""
