"""The suite that every device passes in the tests, on the device that is measured, and CUDA's own tests."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

from benchmarks.gpu.isolation import ROOT
from benchmarks.gpu.steps import say
from benchmarks.gpu.target import Report, Target, WrongResultError

CUDA_TESTS = ROOT / "tests" / "runtime" / "device" / "test_cuda.py"


def run(target: Target, report: Report) -> None:
    """Report a line with the counts of each, and one for each check that failed, after which others go on."""
    failed = run_checks(target, report)
    if target.where.type == "cuda":
        failed += run_tests(report)
    if failed:
        raise WrongResultError(f"{failed} checks failed")


def run_checks(target: Target, report: Report) -> int:
    suite: Any = import_module("tests.runtime.device.device_suite")
    failed = 0
    for name, check in {**suite.CHECKS, **suite.FAULTS}.items():
        device = target.open()
        try:
            check(device)
            device.finish()  # kernels, for which closing does not wait
        except Exception as error:
            failed += 1
            report(check=name, reason=say(error))
        finally:
            device.close()
    report(checks=len(suite.CHECKS), faults=len(suite.FAULTS), failed=failed)
    return failed


class Outcomes:
    """A plugin of pytest that counts tests, and reports a line for each that fails."""

    def __init__(self, report: Report) -> None:
        self.report, self.passed, self.failed = report, 0, 0

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.passed += report.when == "call" and report.passed
        if report.failed:
            self.failed += 1
            crash = getattr(report.longrepr, "reprcrash", None)
            self.report(test=report.nodeid, reason=str(crash.message if crash else report.longrepr)[:500])


def run_tests(report: Report) -> int:
    """Run CUDA's tests under pytest where it is there, with no setting of the project's."""
    lacking = [name for name in ("pytest", "hypothesis") if find_spec(name) is None]
    if lacking:
        report(skipped=f"{' and '.join(lacking)} are not there to run {CUDA_TESTS.name}")
        return 0
    pytest: Any = import_module("pytest")
    outcomes = Outcomes(report)
    options = ["-q", "-c", "/dev/null", "--rootdir", str(ROOT), "-p", "no:cacheprovider"]
    with torch.enable_grad():
        status = pytest.main([*options, str(CUDA_TESTS)], plugins=[outcomes])
    report(tests=outcomes.passed, tests_failed=outcomes.failed, status=int(status))
    return outcomes.failed or int(status)
