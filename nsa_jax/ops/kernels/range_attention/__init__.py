"""Attention of every query over one contiguous range of keys: the compressed and the window branch."""
