"""The two probes at run time: an acquire waits for weights, and a release lets other weights replace them."""
