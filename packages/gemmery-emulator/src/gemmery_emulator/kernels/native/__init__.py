"""Basic blocks as compiled code: loops of few threads run without Python, with the same counters, findings and bits."""
