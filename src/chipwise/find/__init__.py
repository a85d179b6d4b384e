"""Finders: a learning rate from one short sweep, and the largest batch that fits a device."""
