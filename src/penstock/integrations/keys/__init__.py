"""All that an export depends on, in a hash: a module's tensors and attributes, and the code it can reach."""
