"""For compilers that hand over a graph: what they call to have their programs' weights stream."""
