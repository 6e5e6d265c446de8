"""The delegate and the program that runs it, built once, and the models, exported once."""

from functools import cache

import pytest

pytest.importorskip(
    "executorch", reason="executorch is not installed: nothing to export to", exc_type=ImportError
)

from torch.export import export

from tests.backends.executorch.delegate.pte_models import (
    DEEP,
    WIDE,
    Mlp,
    copied,
    decoder_methods,
    for_rows,
    quantised_mlp,
    rows,
    write_files,
)
from tests.backends.executorch.delegate.pte_runs import Runner
from tests.engines import built as build

METHODS = {
    "mlp": lambda: {"forward": export(Mlp().eval(), (rows(),))},
    "quantised": lambda: {"forward": export(quantised_mlp().eval(), (rows(),))},
    "wide": lambda: {"forward": export(Mlp(width=WIDE, layers=DEEP).eval(), (rows(width=WIDE),))},
    "dynamic": lambda: for_rows(Mlp()),
    "quantised rows": lambda: for_rows(quantised_mlp()),
    "decoder": decoder_methods,
}


@pytest.fixture(scope="session")
def built():
    """The folder of the delegate."""
    return build("executorch/run_pte", "build-delegate").parent


@pytest.fixture
def runner(built, tmp_path):
    return Runner(built / "run_pte", built / "libpenstock_executorch.so", tmp_path)


@pytest.fixture(scope="session")
def exported(tmp_path_factory):
    """By a model's name, its files with penstock's delegates, and without any."""

    @cache
    def made(name):
        folder = tmp_path_factory.mktemp(name)
        plain = write_files(folder / "plain", METHODS[name](), delegated=False)
        return write_files(folder / "delegated", METHODS[name]()), plain

    return made


@pytest.fixture(scope="session")
def compiled(tmp_path_factory):
    """By a model's name, its files with code of AOTInductor's."""

    @cache
    def made(name):
        folder = tmp_path_factory.mktemp(name)
        return write_files(folder / "compiled", METHODS[name](), kernels="aotinductor")

    return made


@pytest.fixture
def files(exported, tmp_path):
    """A copy of the MLP's files, to be damaged."""
    return copied(exported("mlp")[0], tmp_path)
