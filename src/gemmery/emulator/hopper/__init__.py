"""What came with Hopper: mbarriers, bulk copies, products of warpgroups, clusters."""
