"""What every test shares: hypothesis runs the same examples each time, with no deadline."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("penstock", derandomize=True, deadline=None, print_blob=False)
settings.load_profile("penstock")
