"""The page of a plan's report: one HTML file that holds its data, its style and its scripts."""
