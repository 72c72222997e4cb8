"""Products timed on a GPU: operands in its memory, replayed graphs, rivals, and the limits of the device."""
