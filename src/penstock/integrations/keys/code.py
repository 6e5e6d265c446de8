"""Says what code does in a hash: what it is made of, and all that it can come to by the names that it uses.

A function names globals of its module, and attributes, some of them in strings (`getattr`). Globals are
looked up where it would find them. An attribute may be a method of any class that was come across, so all
methods of that name are followed. So functions that were replaced at run time, flags of modules and
registries count as they are now, whatever the files say; the files count too, for what no code names.
torch, Python's own library, and all others that no class of the module comes from are known by their
versions, but for what replaces a function of theirs.
"""

from __future__ import annotations

import builtins
import hashlib
import importlib.metadata
import importlib.util
import os
import re
import sys
import sysconfig
import types
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

from torch import nn

from penstock.integrations.keys.values import Found, Words

_PYTHON = tuple(os.path.join(sysconfig.get_paths()[name], "") for name in ("stdlib", "platstdlib"))
_INSTALLED = tuple(
    os.path.join(folder, "")
    for folder in dict.fromkeys([*map(sysconfig.get_path, ("purelib", "platlib")), *sys.path])
    if os.path.basename(folder) in ("site-packages", "dist-packages")
)
"""Where packages are installed: for this environment, for the user, and for all environments."""

_BUILDING = frozenset(
    {
        *(
            "__new__",
            "__post_init__",
            "__init_subclass__",
            "__reduce__",
            "__reduce_ex__",
            "__getstate__",
            "__setstate__",
        ),
        *(
            "__repr__",
            "__str__",
            "__format__",
            "__copy__",
            "__deepcopy__",
            "__del__",
            "__dir__",
            "__sizeof__",
        ),
    }
)
"""Methods that Python calls by itself, and not while a module computes."""

_VARIABLE = re.compile("[A-Z][A-Z0-9_]+")
_IMPORTS = __import__("dis").opmap["IMPORT_NAME"]


class Code(Words):
    """Follows functions and classes, those of the packages `own` and of no package at all.

    `called` are the names of methods that are called on whatever has them. `parts` are those of `Words`.
    """

    def __init__(self, own: frozenset[str], called: Iterable[str], parts: Iterable[object] = ()) -> None:
        super().__init__(parts)
        self._own = own | {""}
        self._packages: set[str] = set(own)
        self._files: set[str] = set()
        self._functions: deque[types.FunctionType] = deque()
        self._known: dict[int, object] = {}
        self._names: set[str] = set(called)
        self._methods: dict[str, list[tuple[Any, Found]]] = defaultdict(list)

    def found(self, code: Any) -> object:
        """Follow a function or a class, once."""
        if isinstance(code, type):
            for kind in () if id(code) in self._known else code.__mro__:
                if id(kind) not in self._known:
                    self._known[id(kind)] = kind
                    self._class(kind)
            return code.__module__, code.__qualname__
        package = _package(code.__code__.co_filename)
        self._packages.add(package or "")
        if package not in self._own:
            return code.__module__, code.__qualname__
        if id(code) not in self._known:
            self._known[id(code)] = code
            self._functions.append(code)
        return code.__module__, code.__qualname__, _digest(code.__code__)

    def follow(self) -> None:
        """Say what all found functions do, and those that are found meanwhile."""
        while self._functions:
            self._function(self._functions.popleft())
        for file in sorted(self._files):
            self.say("file", _text(file))
        for package in sorted(self._packages - {""}):
            self.say("package", package, *_versions(package))

    def _class(self, kind: type) -> None:
        package = package_of(kind)
        left_out = _BUILDING | {"__init__"} if issubclass(kind, nn.Module) else _BUILDING
        left_out -= {"__post_init__"} if package == "" else set()
        for name, held in list(vars(kind).items()):
            if name in left_out:
                continue
            place = Found(f"{kind.__qualname__}.{name}", sure=package == "")
            if (name.startswith("__") and callable(held)) or name in self._names:
                self._member(held, place)
            else:
                self._methods[name].append((held, place))
        if package_of(kind) in self._own:
            self.say(
                "class", kind.__module__, kind.__qualname__, [one.__qualname__ for one in kind.__bases__]
            )
            self._add_file(_file_of(kind))

    def _member(self, held: Any, place: Found) -> None:
        self.say("member", place.where)
        self.value(held, place)

    def _function(self, function: types.FunctionType) -> None:
        code = function.__code__
        self.say("function", function.__module__, function.__qualname__, _digest(code))
        self._add_file(code.co_filename)
        where = f"{function.__module__}.{function.__qualname__}"
        sure = _package(code.co_filename) == ""
        self._held(function, where, sure=sure)
        names = list(dict.fromkeys(name for one in _nested(code) for name in _names(one)))
        for name in names:
            held = function.__globals__.get(name, vars(builtins).get(name, self))
            if held is not self:
                self._global(held, name, names, where, sure=sure)
        for module in _imported(function, names):
            self._global(module, module.__name__, names, where, sure=sure)
        if "environ" in names or "getenv" in names:
            self._environment(code)
        for name in names:
            if name not in self._names:
                self._names.add(name)
                for held, place in self._methods.pop(name, ()):
                    self._member(held, place)

    def _held(self, function: types.FunctionType, where: str, *, sure: bool) -> None:
        """Say what a function holds: its defaults, and what it has from the function around it."""
        for held in (function.__defaults__, function.__kwdefaults__):
            self.value(held, Found(f"a default of {where}", sure))
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            self.value(_content(cell), Found(f"{name}, which {where} uses", sure))

    def _global(self, held: Any, name: str, names: list[str], where: str, *, sure: bool) -> None:
        """Say what a global is; of a module, what the function's other names are in it."""
        self.say("global", name)
        if not isinstance(held, types.ModuleType):
            self.value(held, Found(f"{name}, which {where} uses", sure))
            return
        modules = [held]
        for module in modules:
            inside, file = vars(module), getattr(module, "__file__", None) or ""
            users = bool(file) and _package(file) == ""
            self._add_file(file if users else "")
            for other in names:
                one = inside.get(other, self)
                if isinstance(one, types.ModuleType):
                    modules += [] if one in modules else [one]
                elif one is not self and (callable(one) or not _is_pythons(module)):
                    self.say("of", module.__name__, other)
                    self.value(one, Found(f"{module.__name__}.{other}, which {where} uses", users))

    def _environment(self, code: types.CodeType) -> None:
        """Say the values of the environment's variables that a function names."""
        texts = {text for one in _nested(code) for text in one.co_consts if isinstance(text, str)}
        for name in sorted(filter(_VARIABLE.fullmatch, texts)):
            self.say("environment", name, os.environ.get(name))

    def _add_file(self, file: str) -> None:
        if file and not file.startswith("<"):
            self._files.add(file)


def _nested(code: types.CodeType) -> Iterator[types.CodeType]:
    """A code object and those of the functions inside it."""
    yield code
    for held in code.co_consts:
        if isinstance(held, types.CodeType):
            yield from _nested(held)


def _names(code: types.CodeType) -> Iterator[str]:
    """The names that a code object uses, and those that it may give to `getattr`."""
    yield from code.co_names
    for held in code.co_consts:
        inside = held if isinstance(held, tuple | frozenset) else (held,)
        yield from sorted(one for one in inside if isinstance(one, str) and one.isidentifier())


def _digest(code: types.CodeType) -> str:
    """A hash of what a code object does, wherever it stands."""
    digest = hashlib.sha256()
    for one in _nested(code):
        consts = [_constant(held) for held in one.co_consts]
        facts = (
            *(one.co_qualname, one.co_argcount, one.co_posonlyargcount, one.co_kwonlyargcount, one.co_flags),
            *(one.co_code, one.co_names, one.co_varnames, one.co_freevars, one.co_cellvars, consts),
            one.co_exceptiontable,
        )
        digest.update(repr(facts).encode("utf-8", "backslashreplace"))
    return digest.hexdigest()


def _constant(held: object) -> object:
    if isinstance(held, types.CodeType):
        return "code"
    if isinstance(held, frozenset):
        return "set", sorted(map(repr, held))
    return [_constant(one) for one in held] if isinstance(held, tuple) else (type(held).__name__, held)


def _imported(function: types.FunctionType, names: list[str]) -> Iterator[types.ModuleType]:
    """The modules that a function imports when it runs."""
    code = function.__code__
    if not any(_IMPORTS in one.co_code[::2] for one in _nested(code)):
        return
    package = str(function.__globals__.get("__package__") or "")
    for name in names:
        for base in _parents(package):
            found = sys.modules.get(f"{base}.{name}" if base else name)
            if found is not None:
                yield found


def _parents(package: str) -> list[str]:
    """A package, those that it lies in, and none."""
    parts = package.split(".") if package else []
    return [".".join(parts[:count]) for count in range(len(parts), -1, -1)]


def _content(cell: Any) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # a name that was never bound
        return None


def _is_pythons(module: types.ModuleType) -> bool:
    """Whether a module is of Python's library, whose values (`os.environ`, `sys.path`) are no constants."""
    return module.__name__ in sys.builtin_module_names or _package(module.__file__ or "") is None


@cache
def _package(file: str) -> str | None:
    """The installed package that a file is part of: empty for a user's own, None for Python's library."""
    if not file or file.startswith("<"):
        return "" if not file.startswith("<frozen") else None
    for folder in _INSTALLED:
        if file.startswith(folder):
            return Path(file[len(folder) :]).parts[0].removesuffix(".py")
    return None if file.startswith(_PYTHON) else ""


def package_of(code: Any) -> str | None:
    """The installed package that a function or class is part of, as `_package` has it."""
    return _package(_file_of(code) if isinstance(code, type) else code.__code__.co_filename)


def _file_of(kind: type) -> str:
    """The file that defines a class; `<frozen>` where it comes with Python, empty where there is none."""
    if kind.__module__ in sys.builtin_module_names:
        return "<frozen>"
    return getattr(sys.modules.get(kind.__module__), "__file__", None) or ""


def _text(file: str) -> str:
    """A hash of what a file holds now."""
    try:
        return hashlib.sha256(Path(file).read_bytes()).hexdigest()
    except OSError:
        return ""


def _versions(package: str) -> tuple[str, str]:
    """The version of an installed package by its metadata, and by itself."""
    try:
        version = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        version = ""
    return version, str(getattr(sys.modules.get(package), "__version__", ""))
