"""Models on disk: what files of a model may be read, loading, exports, and checkpoints of other programs."""
