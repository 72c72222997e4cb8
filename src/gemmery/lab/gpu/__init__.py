"""The commands' measurements on a GPU, beside the vendor's library."""
