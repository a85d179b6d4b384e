"""Studies: runs of a recipe with several seeds and settings. Finders of rates and batches, and transfer."""
