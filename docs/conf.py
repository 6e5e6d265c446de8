"""How `make docs` builds the pages: Markdown from the root and docs/, and the reference from docstrings.

Every warning is an error there, and every name in a signature must lead somewhere. Pages of other projects
are listed here, because a build must not need the network.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.ext.napoleon import GoogleDocstring

from penstock import __version__

ROOT = Path(__file__).resolve().parent.parent

project = "penstock"
release = version = __version__
root_doc = "README"
extensions = ["sphinx.ext.autodoc", "myst_parser"]
include_patterns = ["*.md", "docs/*.md", "docs/notes/*.md", "docs/reference/*.rst"]
exclude_patterns = [path.name for path in ROOT.iterdir() if path.is_dir() and path.name != "docs"]
nitpicky = True

autodoc_inherit_docstrings = False
autodoc_member_order = "bysource"
default_role = "code"  # docstrings put code between single backticks
maximum_signature_line_length = 80
add_module_names = False
myst_heading_anchors = 4

html_theme = "furo"
html_title = f"penstock {version}"
html_static_path = ["style"]
html_css_files = ["pages.css"]
html_copy_source = False
html_show_copyright = False
html_show_sphinx = False

CONTENTS = """
```{toctree}
:hidden:
:caption: Using penstock

docs/first-ten-minutes
docs/first-steps
docs/questions
docs/transformers
docs/diffusers
docs/large-models
docs/quantised
docs/security
docs/training
docs/sparse
docs/lowering
docs/without-python
docs/executorch
docs/passes
docs/backends
docs/devices
docs/hardware
docs/reference/index
```

```{toctree}
:hidden:
:caption: How it works

ARCHITECTURE
docs/planning
docs/payload
docs/benchmarks
docs/zoo
```

```{toctree}
:hidden:
:caption: Project

CHANGELOG
SECURITY
CONTRIBUTING
docs/testing
```

```{toctree}
:hidden:
:caption: Notes
:glob:

docs/notes/*
```
"""
"""The order of the pages. It is not in README.md, where other readers of Markdown would show it as code."""

PYTHON = "https://docs.python.org/3/library/"
TORCH = "https://docs.pytorch.org/docs/stable/"
OUTSIDE = {
    "AbstractContextManager": f"{PYTHON}contextlib.html#contextlib.AbstractContextManager",
    "BaseException": f"{PYTHON}exceptions.html#BaseException",
    "Callable": f"{PYTHON}collections.abc.html#collections.abc.Callable",
    "Iterator": f"{PYTHON}collections.abc.html#collections.abc.Iterator",
    "Mapping": f"{PYTHON}collections.abc.html#collections.abc.Mapping",
    "Sequence": f"{PYTHON}collections.abc.html#collections.abc.Sequence",
    "Path": f"{PYTHON}pathlib.html#pathlib.Path",
    "PathLike": f"{PYTHON}os.html#os.PathLike",
    "Exception": f"{PYTHON}exceptions.html#Exception",
    "DiGraph": "https://networkx.org/documentation/stable/reference/classes/digraph.html",
    "ExportedProgram": f"{TORCH}user_guide/torch_compiler/export/api_reference.html",
    "GraphModule": f"{TORCH}fx.html#torch.fx.GraphModule",
    "Node": f"{TORCH}fx.html#torch.fx.Node",
    "OperatorSupportBase": f"{TORCH}fx.html",
    "PassResult": f"{TORCH}fx.html",
    "Module": f"{TORCH}generated/torch.nn.Module.html",
    "Tensor": f"{TORCH}tensors.html",
    "device": f"{TORCH}tensor_attributes.html#torch.device",
    "dtype": f"{TORCH}tensor_attributes.html#torch.dtype",
}
"""Where names of Python and torch are documented, by the last part of the name."""
BUILT_IN = {
    "Any",
    "Literal",
    "None",
    "bool",
    "bytes",
    "dict",
    "float",
    "int",
    "object",
    "slice",
    "str",
    "tuple",
}
TYPE_VARIABLES = {"Value", "_Function", "_Result"}


class Written(str):
    """An annotation that is shown as it stands in the source."""

    __repr__ = str.__str__


def write_signature(app: Sphinx, what: str, name: str, found: Any, *_: Any) -> tuple[str, str | None] | None:
    """The signature as the source has it, with aliases by name; none for classes without own fields."""
    if what == "class" and not (dataclasses.is_dataclass(found) and vars(found).get("__annotations__")):
        return "", None
    if what not in ("function", "method", "class"):
        return None
    signature = inspect.signature(found)
    homes = [inspect.getmodule(one) for one in (inspect.getmro(found) if what == "class" else [found])]
    aliases = {name: value for home in homes for name, value in vars(home).items()}
    shown = [
        one.replace(annotation=_written(one.annotation, aliases), default=_short(one.default))
        for one in signature.parameters.values()
        if one.name not in ("self", "cls")
    ]
    returned = None if what == "class" else signature.return_annotation
    return str(signature.replace(parameters=shown, return_annotation=signature.empty)), returned


def _written(annotation: str, aliases: Mapping[str, Any]) -> Written:
    """An annotation; choices of literals, which are no documented names, in place of their aliases."""

    def meant(name: re.Match[str]) -> str:
        found = aliases.get(name[0])
        return f"Literal{list(get_args(found))}" if get_origin(found) is Literal else name[0]

    return Written(re.sub(r"\b[A-Za-z_]\w*\b", meant, annotation))


def _short(default: Any) -> Any:
    return Written("...") if default is not inspect.Parameter.empty and len(repr(default)) > 40 else default


def format_sections(app: Sphinx, what: str, *given: Any) -> None:
    """Reads sections such as "Raises:" where there may be some; elsewhere a colon is only a colon."""
    lines = given[-1]
    if what in ("class", "exception", "function", "method"):
        lines[:] = str(GoogleDocstring(lines, what=what)).splitlines()


def find_reference(app: Sphinx, env: Any, node: Any, content: Any) -> nodes.Node | None:
    """Where a name of a signature is documented, here under any module or at another project."""
    if node.get("refdomain") != "py":
        return None
    name = node["reftarget"].rpartition(".")[2]
    if name in BUILT_IN | TYPE_VARIABLES:
        return content
    if name in OUTSIDE:
        return nodes.reference("", "", content, internal=False, refuri=OUTSIDE[name])
    objects = env.get_domain("py").objects
    documented = {found.docname: key for key, found in objects.items() if key.rpartition(".")[2] == name}
    for document, key in documented.items():
        return nodes.reference(
            "",
            "",
            content,
            internal=True,
            refuri=f"{app.builder.get_relative_uri(node['refdoc'], document)}#{objects[key].node_id}",
        )
    return None


def add_contents(app: Sphinx, page: str, source: list[str]) -> None:
    """Gives the first page the list of all others."""
    if page == root_doc:
        source[0] += CONTENTS


def write_index(app: Sphinx, error: Exception | None) -> None:
    """Leads from the folder to the first page."""
    if error is None:
        target = f'<meta http-equiv="refresh" content="0; url={root_doc}.html">'
        (Path(app.outdir) / "index.html").write_text(f"<!doctype html>{target}\n")


def setup(app: Sphinx) -> None:
    app.connect("autodoc-process-signature", write_signature)
    app.connect("autodoc-process-docstring", format_sections)
    app.connect("missing-reference", find_reference)
    app.connect("source-read", add_contents)
    app.connect("build-finished", write_index)
