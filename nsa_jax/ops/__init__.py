"""Pure functions on arrays: the operator, its implementations and block arithmetic."""
