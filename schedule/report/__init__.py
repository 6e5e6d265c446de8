"""What people see of a plan: pages, timelines, and comparisons with other policies and budgets."""
