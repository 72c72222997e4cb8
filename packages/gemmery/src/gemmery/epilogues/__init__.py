"""What follows a product, as a function of its sums: traced to a graph, with a reference, an error bound, gradients."""
