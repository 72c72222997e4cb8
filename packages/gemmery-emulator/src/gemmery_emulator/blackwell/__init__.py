"""Instructions of Blackwell (sm_100): tensor memory, and products of matrices that one thread starts."""
