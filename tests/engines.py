"""What streams and compiles here: tests over both engines take the native one where it is built.

The fixtures `native` and `compiler` in conftest.py are for tests that need the one or the other.
tests/native/test_library.py fails where the native engine is missing although there is a compiler.
"""

from __future__ import annotations

import os
import shutil

from penstock.native.library import library

ENGINES = ("python",) if library() is None else ("python", "native")
COMPILER = shutil.which(os.environ.get("CXX", "g++"))
"""What builds the native engine, and what Inductor compiles with."""
