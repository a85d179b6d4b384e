"""Reads what XLA compiled: kernels with their operations, bytes and estimated cycles."""
