"""Reports of a run or a study: settings, curves, where the time went, what was slow, what to try."""
