"""One run's story, or a study's: settings, curves, where the time went, what was slow, what to try."""
