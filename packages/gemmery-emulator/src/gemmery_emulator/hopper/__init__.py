"""The features that Hopper introduced: mbarriers, bulk copies, products of warpgroups, clusters."""
