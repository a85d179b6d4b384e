"""Sends the rows of a run folder to Weights & Biases, MLflow and Trackio."""
