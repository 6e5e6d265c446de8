"""The suite that every device passes in the tests, on the device that is measured."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from benchmarks.gpu.target import Report, Target, WrongResultError


def run(target: Target, report: Report) -> None:
    """One line with the counts, and one for each check that failed, after which the others go on."""
    suite: Any = import_module("tests.runtime.device.device_suite")
    failed = 0
    for name, check in {**suite.CHECKS, **suite.FAULTS}.items():
        device = target.open()
        try:
            check(device)
            device.finish()  # kernels, for which closing does not wait
        except Exception as error:
            failed += 1
            report(check=name, reason=f"{type(error).__name__}: {error}")
        finally:
            device.close()
    report(checks=len(suite.CHECKS), faults=len(suite.FAULTS), failed=failed)
    if failed:
        raise WrongResultError(f"{failed} checks of the device suite failed")
