"""Compares published training throughputs with plans: `python -m benchmarks.plan_accuracy`."""
