"""What the blocks that one multiprocessor runs side by side ask of it, and how long their warps wait."""
