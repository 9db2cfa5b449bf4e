"""Attention of every query over its own list of key blocks."""
