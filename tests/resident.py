"""How much memory a process of a test's own takes."""

import re
from pathlib import Path


def peak_above(function):
    """Return the bytes that are resident at most while a function runs, above those before it.

    Pages of libraries count once they are touched: what is measured should have run before.
    """
    Path("/proc/self/clear_refs").write_text("5")
    before = _resident("VmRSS")
    function()
    return _resident("VmHWM") - before


def _resident(name):
    return int(re.search(name + r":\s+(\d+)", Path("/proc/self/status").read_text())[1]) << 10
