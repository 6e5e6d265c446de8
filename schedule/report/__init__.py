"""Reports of a plan for people: pages, timelines, and comparisons with other policies and budgets."""
