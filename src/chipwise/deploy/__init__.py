"""A trained model used elsewhere: predictions, exports to other formats."""
