"""Measuring: the protocol, the rivals, the machine's limits, and records."""
