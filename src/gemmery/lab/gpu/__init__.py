"""The commands' measurements on a GPU, compared with the vendor's library."""
