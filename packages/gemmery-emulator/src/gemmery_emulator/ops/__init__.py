"""Instructions that only compute, from registers to registers."""
