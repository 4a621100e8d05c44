"""The site, of the same pages that GitHub shows: `sphinx-build -W --keep-going -b html docs build/site`.

The notebooks are executed, without a GPU. The reference imports nothing: sphinx-autoapi reads the source.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any

from autoapi import _astroid_utils
from autoapi._parser import Parser
from sphinx.ext.napoleon import GoogleDocstring

DOCS = Path(__file__).parent
ROOT = DOCS.parent
sys.path.insert(0, str(ROOT))

from docs import steppers  # noqa: E402

project = html_title = "gemmsmith"
extensions = ["myst_nb", "autoapi.extension", "sphinx.ext.napoleon"]
html_theme = "furo"
html_copy_source = False
html_show_copyright = False
html_static_path, html_css_files = ["site.css"], ["site.css"]
highlight_language = "none"  # of blocks without one: reports
pygments_style, pygments_dark_style = "friendly", "monokai"

nb_execution_mode, nb_execution_timeout = "force", 300  # seconds a cell
nb_execution_raise_on_error = True
nb_merge_streams = True
myst_heading_anchors = 4  # links to headings are checked, as GitHub names them
suppress_warnings = ["autoapi.python_import_resolution"]  # of constants that are assigned in pairs; none is public

PUBLIC = {"gemmsmith", *re.findall(r"(?m)^## (gemmsmith\.[\w.]+)", (DOCS / "reference/python.md").read_text())}
"""The packages whose names are public."""
autoapi_dirs = ["../src"]
autoapi_root = "reference/python"
autoapi_add_toctree_entry = False
autoapi_options = ["members", "show-module-summary", "imported-members"]
autoapi_own_page_level = "class"
autoapi_python_class_content = "both"
add_module_names = False
default_role = "py:obj"  # `name` in a docstring: a link if it is public, else code
maximum_signature_line_length = 100
napoleon_use_ivar = True

WHOLE = {
    "index": "README.md", "changelog": "CHANGELOG.md", "contributing": "CONTRIBUTING.md", "security": "SECURITY.md",
    "rows": "benchmarks/results/README.md", "learn/races": "examples/races/README.md",
}  # fmt: skip
"""Pages of the site whose text is a file outside of docs/."""
PLACES = {ROOT / file: DOCS / f"{name}.md" for name, file in WHOLE.items()}
PLACES |= {file: DOCS / "races" / f"{file.stem}.md" for file in steppers.RACES.glob("*.py")}
LINK = re.compile(r"(\]\()([^)#\s:]+)")
TOCTREES = {"reference/python": "```{toctree}\n:hidden:\n\npython/gemmsmith/index\n```"}
ADDED = steppers.pages()
"""Pages that only the site has, by their path: they are written before it is built, and deleted afterwards."""
for hub, folder in (("reference/ladder", "rungs"), ("learn/races", "races")):
    entries = "\n".join(f"/{x.removesuffix('.md')}" for x in ADDED if x.startswith(f"{folder}/"))
    TOCTREES[hub] = f"```{{toctree}}\n:hidden:\n\n{entries}\n```"
PUBLIC_NAME = re.compile(r"(?<!\[)(`gemmsmith\.\w[\w.]*`)")
SECTION = re.compile(r"^## (.*)\n\n((?:- .*\n)+)", re.MULTILINE)


def with_links(text: str, source: Path, page: Path) -> str:
    """Return the text of the file `source` with its links as they are from `page`."""

    def link(x: re.Match[str]) -> str:
        file = (source.parent / x.group(2)).resolve()
        if not file.is_file():
            return x.group()
        file = PLACES.get(file, file)
        is_no_page = file.suffix == ".md" and DOCS not in file.parents  # a file to load, as those of code
        return x.group(1) + "path:" * is_no_page + os.path.relpath(file, page.parent)

    return LINK.sub(link, text)


def toctrees(text: str) -> str:
    """Return the lists of docs/index.md as the sections of the site's sidebar."""
    sections = []
    for caption, items in SECTION.findall(text):
        links = "\n".join(f"{title} <{target}>" for title, target in re.findall(r"\[(.*?)\]\((.*?)\)", items))
        sections.append(f"```{{toctree}}\n:hidden:\n:caption: {caption}\n\n{links}\n```\n")
    return "\n".join(sections)


def read(app: Any, name: str, source: list[str]) -> None:
    """Take the text of `WHOLE` pages from their files, and lead all links to pages of the site."""
    page = DOCS / f"{name}.md"
    if not page.exists():  # of autoapi
        return
    file = ROOT / WHOLE[name] if name in WHOLE else page
    text = PUBLIC_NAME.sub(r"{py:obj}\1", with_links(file.read_text(), file, page))
    text = steppers.with_steppers(text, name, app.found_hazards)
    source[0] = f"{text}\n{toctrees(source[0]) if name == 'index' else TOCTREES.get(name, '')}"


def add_pages(app: Any) -> None:
    """Make the steppers, and write the pages that only the site has."""
    app.found_hazards = steppers.make(Path(app.outdir) / steppers.FOLDER)
    for name, text in ADDED.items():
        (DOCS / name).parent.mkdir(exist_ok=True)
        (DOCS / name).write_text(text)


def remove_pages(app: Any, error: Exception | None) -> None:
    for folder in {(DOCS / name).parent for name in ADDED}:
        shutil.rmtree(folder, ignore_errors=True)


def skip(app: Any, what: str, name: str, found: Any, skipped: bool, options: Any) -> bool | None:
    """Leave out the modules that are not public."""
    return name not in PUBLIC if what in ("module", "package") else None


def parse_if(self: Parser, node: Any) -> list[Any]:
    """Read the imports of a package that only type checkers execute: gemmsmith.torch imports these names when used."""
    imports = [x for x in node.body if node.root().package and _astroid_utils.is_local_import_from(x, "gemmsmith")]
    return [name for x in imports for name in self._parse_local_import_from(x)]


Parser.parse_if = parse_if
_astroid_utils._is_property_decorator = lambda x: x.name in ("property", "cached_property")  # functools' and ours
GoogleDocstring._parse_attribute_docstring = GoogleDocstring._consume_to_end  # its colons separate no type


def setup(app: Any) -> None:
    app.connect("builder-inited", add_pages)
    app.connect("build-finished", remove_pages)
    app.connect("source-read", read)
    app.connect("autoapi-skip-member", skip)
