"""Kernel configurations: small frozen dataclasses, chosen by a heuristic from shape and GPU generation.

Each kernel family adds one dataclass (tile sizes, warps, stages) and one function that picks it.
"""
