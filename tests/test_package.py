"""The package as it is installed: its public face, its contents, and its pins."""

from __future__ import annotations

import ast
import doctest
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from email import message_from_bytes
from functools import partial
from importlib.metadata import PackageNotFoundError, distribution
from itertools import chain
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import penstock
import penstock.native
from tests.engines import COMPILER
from tests.forked import Done, Parent, run_forked

ROOT = Path(__file__).resolve().parent.parent
LINKS = ("passes", "schedule", "runtime", "native")


def run_python(code):
    """What a fresh interpreter prints."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_makes_environment_has_all_that_tests_are_skipped_without():
    """The one place that says it: tests of an extra skip themselves where the extra is not installed."""
    if not Path(sys.prefix, ".installed").exists():
        pytest.skip("this environment is not one of `make`")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = chain.from_iterable(project["optional-dependencies"][name] for name in ("demo", "bench", "dev"))
    missing = [name for one in extras if not is_installed(name := Requirement(one).name)]
    assert not missing, "make the environment again: rm .venv/.demo; make check"


def is_installed(name):
    try:
        distribution(name)
    except PackageNotFoundError:
        return False
    return True


def test_importing_penstock_does_not_import_torch():
    code = "import penstock, sys; print(sorted({'torch', 'networkx', 'scipy', 'pydantic'} & {*sys.modules}))"
    assert run_python(code) == "[]"


def test_importing_the_errors_does_not_import_torch():
    code = "import penstock, sys; penstock.BudgetError; print('torch' in sys.modules)"
    assert run_python(code) == "False"


def test_what_opens_an_artifact_imports_no_compiler():
    code = "import penstock, sys; penstock.open; print({'torch._dynamo', 'torch._inductor'} & {*sys.modules})"
    assert run_python(code) == "set()"


@pytest.mark.parametrize("name", penstock.__all__)
def test_every_public_name_is_there(name):
    assert getattr(penstock, name) is not None
    assert name in dir(penstock)


@pytest.mark.parametrize("name", ["integrations.apply", "integrations.load", "backends.fx", "backends.onnx"])
def test_packages_of_public_names_come_when_they_are_asked_for(name):
    package = name.partition(".")[0]
    code = f"""
import penstock, sys
print('penstock.{package}' in sys.modules, {package!r} in dir(penstock), penstock.{name})
"""
    done = run_forked(code, warnings="default")
    assert done.status == 0, done.err
    assert done.out.startswith("False True <")


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="nonsense"):
        _ = penstock.backends.nonsense
    with pytest.raises(AttributeError, match="nonsense"):
        _ = penstock.nonsense


def test_type_checkers_see_the_same_names_as_programs():
    tree = ast.parse((ROOT / "src/penstock/__init__.py").read_text())
    blocks = (node for node in tree.body if isinstance(node, ast.If))
    block = next(node for node in blocks if ast.unparse(node.test) == "TYPE_CHECKING")
    seen = {name.name for node in block.body if isinstance(node, ast.ImportFrom) for name in node.names}
    assert seen | {"__version__"} == set(penstock.__all__)
    for node in block.body:
        assert isinstance(node, ast.ImportFrom)
        for alias in node.names:
            value = getattr(penstock, alias.name)
            home = sys.modules[str(node.module)]
            assert getattr(home, alias.name) is value


def test_errors_are_one_tree():
    names = [name for name in penstock.__all__ if name.endswith("Error")]
    assert len(names) == 8
    assert all(issubclass(getattr(penstock, name), penstock.PenstockError) for name in names)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A folder with an sdist, and the wheel that was built from it without any network and any compiler."""
    source = tmp_path_factory.mktemp("source")
    for name in ("src", *LINKS):
        ignore = shutil.ignore_patterns("__pycache__", "*.egg-info")
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=ignore)
    for path in (ROOT / "pyproject.toml", ROOT / "MANIFEST.in", ROOT / "LICENSE", *ROOT.glob("*.md")):
        shutil.copy(path, source / path.name)
    target = tmp_path_factory.mktemp("built")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(target), str(source)]
    environment = {**os.environ, "CC": "false", "CXX": "false"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return target


@pytest.fixture(scope="module")
def compiled(built, tmp_path_factory):
    """The wheel that the sdist becomes where there is a compiler."""
    (sdist,) = built.glob("*.tar.gz")
    target = tmp_path_factory.mktemp("compiled")
    pip = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-index", "--no-build-isolation"]
    # The compiler is told -O0 -g0 last: what the engine can do is tested elsewhere, and compiling takes long.
    quick = {
        name: f"sh -c 'exec {one} \"$@\" -O0 -g0' {one}" for name, one in (("CXX", "g++"), ("CC", "gcc"))
    }
    subprocess.run([*pip, "-w", str(target), str(sdist)], env=os.environ | quick, check=True)
    (wheel,) = target.glob("*.whl")
    return wheel


KINDS = ("py", "html", "css", "js", "txt")
"""Kinds of files in the linked folders: code, the page of a plan's report, and the licence of its charts."""


def list_sources():
    """What an installed package must hold, by its path in site-packages."""
    linked = (ROOT / link for link in LINKS)
    named = (path for folder in linked for kind in KINDS for path in folder.rglob(f"*.{kind}"))
    files = (path for path in named if path.name != "CMakeLists.txt")
    found = {f"penstock/{path.relative_to(ROOT)}" for path in files} | {"penstock/native/penstock.h"}
    own = ROOT / "src/penstock"
    links = tuple(own / link for link in LINKS)
    for path in (*own.rglob("*.py"), *own.rglob("*.txt"), own / "py.typed"):
        if not any(path.is_relative_to(link) for link in links):
            found.add(f"penstock/{path.relative_to(own)}")
    return found


def test_the_wheel_holds_the_root_folders_and_nothing_else(built):
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        assert names == list_sources()
        for name in names:
            home = ROOT / name.removeprefix("penstock/")
            home = home if home.exists() else ROOT / "src" / name
            assert archive.read(name) == home.read_bytes()


@pytest.mark.nightly
def test_the_wheel_of_a_compiler_has_the_engine_besides(compiled):
    with zipfile.ZipFile(compiled) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    engines = {name for name in names if re.fullmatch(r"penstock/native/_engine\..*\.so", name)}
    assert len(engines) == (COMPILER is not None)
    assert names - engines == list_sources()


def test_the_engine_is_small_and_shows_what_its_header_declares(native):
    (engine,) = Path(penstock.native.__path__[0]).glob("_engine*.so")
    assert engine.stat().st_size < 1 << 20
    command = ["nm", "-D", "--defined-only", str(engine)]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[2::3]
    assert {*shown} == {*re.findall(r"\bps_\w+(?=\()", (ROOT / "native/penstock.h").read_text())}


def test_the_wheel_has_its_licence_and_its_command(built):
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        meta = {name.split("/", 1)[1]: name for name in archive.namelist() if ".dist-info/" in name}
        assert "licenses/native/LICENSE.txt" in meta
        assert {"licenses/LICENSE", "licenses/schedule/report/page/vendor/LICENSE.txt"} <= meta.keys()
        assert "penstock = penstock.cli.main:main" in archive.read(meta["entry_points.txt"]).decode()
        assert f"Version: {penstock.__version__}" in archive.read(meta["METADATA"]).decode()


def test_the_sdist_has_files_where_the_checkout_has_links(built):
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        assert not [member.name for member in archive if member.issym() or member.islnk()]
        names = {member.name.partition("/")[2] for member in archive}
        assert {"README.md", "CHANGELOG.md", "ARCHITECTURE.md", "CONTRIBUTING.md"} <= names
        assert "src/penstock/schedule/facts/model.py" in names


def needed(requirements):
    """The distributions that `pip install` of some would install here, by what each declares."""
    seen: set[tuple[str, frozenset[str]]] = set()
    left = [(one.name, frozenset(one.extras)) for one in requirements]
    while left:
        name, extras = left.pop()
        if (name, extras) in seen:
            continue
        seen.add((name, extras))
        for one in map(Requirement, distribution(name).requires or ()):
            if one.marker is None or any(one.marker.evaluate({"extra": extra}) for extra in {"", *extras}):
                left.append((one.name, frozenset(one.extras)))
    return {name for name, _ in seen}


@pytest.fixture(scope="module")
def fresh(compiled, tmp_path_factory):
    """What a shell has after the page's `pip install`, with the wheel built here, and an empty home.

    The libraries, and no others than the wheel's metadata names, are links to those of this environment,
    since to fetch them takes minutes.
    """
    home = tmp_path_factory.mktemp("home")
    venv.create(home / "env", symlinks=True)
    python = str(home / "env/bin/python")
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-deps", "--no-index"]
    subprocess.run([*pip, str(compiled)], check=True)
    (site,) = home.glob("env/lib/python*/site-packages")
    (asked,) = re.findall(
        r"^\$ pip install '(.*)'$", (ROOT / "docs/first-ten-minutes.md").read_text(), re.MULTILINE
    )
    with zipfile.ZipFile(compiled) as archive:
        (metadata,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        declared = message_from_bytes(archive.read(metadata)).get_all("Requires-Dist") or []
    extras = {"", *Requirement(asked.removeprefix("./")).extras}
    direct = [Requirement(one) for one in declared]
    wanted = [r for r in direct if r.marker is None or any(r.marker.evaluate({"extra": e}) for e in extras)]
    for name in needed(wanted):
        files = distribution(name).files or []
        for top in {Path(file.parts[0]) for file in files} - {Path(".."), Path("__pycache__")}:
            if not (site / top).exists():
                (site / top).symlink_to(Path(str(distribution(name).locate_file(top))))
    path = f"{home / 'env/bin'}:{os.environ['PATH']}"
    quiet = {"PENSTOCK_ANNOUNCE_AFTER": "inf"}  # what is printed does not depend on the machine's speed
    return {"PATH": path, "HOME": str(home), "COLUMNS": "80", "LANG": "C.UTF-8", **quiet}


COMMAND = """
import runpy, sys
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""Runs the script that its first argument names, such as the console script that pip has written."""


@pytest.fixture(scope="module")
def parent(fresh):
    """The fresh environment's Python, with what most commands import."""
    python = shutil.which("python", path=fresh["PATH"])
    assert python
    parent = Parent(python, fresh, ("transformers.models.llama.modeling_llama",))
    yield parent
    parent.close()


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_the_first_ten_minutes_go_as_the_page_says(fresh, parent, tmp_path):
    """Commands are typed in a shell, but for those of a program that another has started before."""
    page = (ROOT / "docs/first-ten-minutes.md").read_text()
    for name, text in re.findall(r"^```python\n# (\w+\.py)\n(.*?)^```", page, re.MULTILINE | re.DOTALL):
        (tmp_path / name).write_text(text)
    consoles = "".join(re.findall(r"^```console\n(.*?)^```", page, re.MULTILINE | re.DOTALL))
    steps = [step.partition("\n") for step in re.split(r"^\$ ", consoles, flags=re.MULTILINE)[1:]]
    assert steps.pop(0)[0].startswith("pip install")  # what `fresh` stands for
    home = parent.run("import penstock; print(penstock.__file__)", warnings="default").out
    assert Path(home).is_relative_to(fresh["HOME"])
    alike = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    started = set()
    for command, _, expected in steps:
        program, *words = shlex.split(command)
        ours = program == "penstock"  # libraries may complain, penstock may not
        if program in started:
            script = [shutil.which(program, path=fresh["PATH"])] * ours
            done = parent.run(COMMAND, *script, *words, folder=tmp_path, warnings="default", together=ours)
        else:
            shell = partial(subprocess.run, shell=True, check=False, cwd=tmp_path, env=fresh, text=True)
            typed = shell(
                command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT if ours else subprocess.PIPE
            )
            done = Done(typed.returncode, typed.stdout, typed.stderr or "")
        started.add(program)
        said = f"$ {command}\n{done.out}{done.err}"
        assert doctest.OutputChecker().check_output(expected, done.out, alike), said
        refused = expected.startswith("penstock: ") and "Wrote" not in expected
        assert (done.status != 0) == refused, said


def read_pins():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {normalise(name): version for name, version in pins}


def normalise(name):
    return re.sub(r"[-_.]+", "-", name).lower()


def test_every_dependency_is_pinned():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *chain.from_iterable(project["optional-dependencies"].values())]
    (tools,) = re.findall(r" -c constraints\.txt (.+)", (ROOT / "scripts/build-wheels").read_text())
    wanted += tools.split()
    names = {normalise(re.split(r"[<>=\[]", requirement)[0]) for requirement in wanted}
    assert names <= read_pins().keys()


def test_the_pins_keep_to_a_build_for_the_cpu():
    pins = read_pins()
    assert pins["torch"] == "2.13.0"
    assert not [name for name in pins if "nvidia" in name or "triton" in name or "cuda" in name]


@pytest.mark.parametrize(
    ("call", "library"),
    [
        ("cli('preflight', 'model/config.json', '--budget', '1GiB', '--hardware', 'h200')", "transformers"),
        ("cli('doctor', 'model/config.json')", "transformers"),
        ("cli('compile', 'model', 'm.penstock')", "transformers"),
        ("penstock.integrations.load('model', memory='1GiB')", "transformers"),
        ("penstock.integrations.load('pipeline', memory='1GiB')", "diffusers"),
        ("penstock.unpack_gguf(None)", "diffusers"),
    ],
)
def test_without_an_optional_library_one_sentence_names_the_extra(call, library, tmp_path):
    for name, file in (("model", "config.json"), ("pipeline", "model_index.json")):
        (tmp_path / name).mkdir()
        (tmp_path / name / file).write_text("{}")
        (tmp_path / name / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    code = f"""
import sys
sys.modules.update(dict.fromkeys(("transformers", "diffusers", "gguf")))  # as where none is installed
import penstock, penstock.integrations
from penstock.cli.main import main
def cli(*words):
    sys.argv = ["penstock", *words]
    main()
try:
    {call}
except penstock.PenstockError as error:
    assert isinstance(error, ImportError)
    sys.exit(str(error))
"""
    done = run_forked(code, folder=tmp_path)
    assert done.status in (1, 2), done.err
    said = " ".join(done.err.split())
    assert re.search(rf"needs {library}: pip install .*{library.replace('_', '.')}", said)
    assert "Traceback" not in said


def test_the_citation_names_this_version():
    assert f"version: {penstock.__version__}" in (ROOT / "CITATION.cff").read_text().splitlines()


def test_nothing_says_to_install_from_a_registry_that_lacks_it():
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    wrong = re.compile(r"pip install[^\n]*['\" ]penstock\b(?!/)")
    for name in listed.splitlines():
        if Path(name).suffix in (".py", ".md", ".toml", ".rst", "") and (ROOT / name).is_file():
            assert not wrong.search((ROOT / name).read_text(errors="replace")), name


@pytest.mark.parametrize(
    ("before", "here"),
    [
        ("sys.platform = 'darwin'", "darwin"),
        ("sys.platform = 'win32'", "win32"),
        ("sys.version_info = (3, 10, 4)", "linux with Python 3.10"),
    ],
)
def test_other_systems_and_pythons_end_with_one_sentence(before, here):
    code = f"import sys; {before}\ntry: import penstock\nexcept ImportError as error: print(error)"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert re.fullmatch(
        rf"penstock runs on Linux .*, and this is {here}.*: use it in .* Linux\n", done.stdout
    )
    assert done.stderr == ""


def test_an_installation_elsewhere_ends_before_anything_is_compiled():
    code = "import runpy, sys; sys.platform = 'darwin'; runpy.run_path('setup.py')"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False, capture_output=True, text=True)
    assert done.returncode == 1
    assert re.fullmatch(r"penstock runs on Linux, and this is darwin: .*\n", done.stderr)
