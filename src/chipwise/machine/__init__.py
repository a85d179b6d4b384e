"""The devices a program runs on: found, simulated, explained, and shared out among replicas."""
