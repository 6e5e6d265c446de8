"""Reads that depend on data: which operators need single slices of a weight, and how they run in parts."""
