"""Reports of a run: settings, curves, where the time went, what was slow, what to try."""
