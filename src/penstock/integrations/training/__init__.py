"""Models whose adapters are trained while their frozen weights stream."""
