"""Programs that are trained: frozen weights stream in forward and backward."""
