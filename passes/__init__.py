"""Exported program in, facts out: which node reads which weight, in what order, and at what cost."""
