"""Attacks on the project's promises, drawn from a seed: `make chaos MINUTES=10`."""
