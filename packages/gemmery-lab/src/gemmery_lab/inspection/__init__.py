"""`inspect`: the resources, occupancy, roofline and memory counters of a GPU rung or an exhibit, without a GPU."""
