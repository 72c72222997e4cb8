"""The ladder: every kernel as one row, and look-up."""
