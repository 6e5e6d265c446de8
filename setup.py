"""Ends an installation on another system with one sentence, before a compiler does with many."""

import sys

if not sys.platform.startswith("linux"):
    sys.exit(
        f"penstock runs on Linux, and this is {sys.platform}: use a container or a virtual machine of Linux"
    )

from setuptools import setup

setup()
