"""What every test shares: hypothesis runs the same examples each time, with no deadline."""

import gc
import logging
import os
import signal
import warnings

import pytest
from hypothesis import settings
from hypothesis.internal.conjecture import providers

from tests.cli.command_line import penstock_fixture  # noqa: F401
from tests.engines import COMPILER, ENGINES
from tests.kept_code import keeping

settings.register_profile("penstock", derandomize=True, deadline=None, print_blob=False)
settings.load_profile("penstock")
# Hypothesis also draws constants of the modules that are loaded, and each worker has loaded others.
providers._get_local_constants = providers.Constants

# torch reads it as it is imported. Kernels are compiled as ever, and what calls them in seconds less.
os.environ.setdefault("AOT_INDUCTOR_COMPILE_WRAPPER_OPT_LEVEL", "O0")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell starts so what it runs in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)

_INDUCTORS_OWN = "TORCHINDUCTOR_CACHE_DIR" not in os.environ  # libraries that tests import may set it


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory):
    """What penstock remembers of a machine stays out of the user's folders, in child processes too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        patch.setenv(
            "PENSTOCK_ANNOUNCE_AFTER", "inf"
        )  # what is printed does not depend on the machine's speed
        if _INDUCTORS_OWN:
            base = tmp_path_factory.getbasetemp()
            base = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base  # that of all workers
            patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(base / "inductor"))
        yield


@pytest.fixture(scope="session", autouse=True)
def kept_code():
    """What AOTInductor's C++ compiles to is kept, and taken where it comes again."""
    from torch._inductor import cpp_builder

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpp_builder, "run_compile_cmd", keeping(cpp_builder.run_compile_cmd))
        yield


@pytest.fixture
def quiet():
    """Dynamo starts anew; torch and its backends say nothing of themselves."""
    import torch

    torch._dynamo.reset()
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        yield
    torch._dynamo.reset()


@pytest.fixture(scope="session")
def native():
    """For what runs on the native engine alone."""
    if "native" not in ENGINES:
        pytest.skip("the native engine is not built: penstock was installed without a C++ compiler")


@pytest.fixture(scope="session")
def compiler():
    """For what Inductor compiles."""
    if COMPILER is None:
        pytest.skip("Inductor has no C++ compiler: scripts/install-compiler installs one")


class _Heard(logging.Handler):
    """Keeps what it is told."""

    def __init__(self):
        super().__init__(logging.INFO)
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())


@pytest.fixture
def said():
    """Returns what penstock has logged, from info on, since it was last asked."""
    logger, heard = logging.getLogger("penstock"), _Heard()
    level = logger.level
    logger.addHandler(heard)
    logger.setLevel(logging.INFO)

    def take():
        lines, heard.lines = heard.lines, []
        return "\n".join(lines)

    yield take
    logger.removeHandler(heard)
    logger.setLevel(level)


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """What is imported and collected stays: the collector need not look through it again and again.

    What tests import later stays, too, so all is looked through a tenth as often, as in the command line: it
    was a tenth of the suite's time.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.collect()
        gc.freeze()
        gc.set_threshold(700, 10, 100)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item, nextitem):
    """What the tests of a file have imported stays, too: the collector looks through it no more.

    Each plan of an applied model collects garbage: 20 ms of a process that has imported little, and 0.7 s of
    one that has run thousands of tests.
    """
    try:
        return (yield)
    finally:
        if nextitem is not None and nextitem.path != item.path:
            gc.collect()
            gc.freeze()
