"""The documentation site: `make docs` builds it of the pages in this folder, and of one for each method (pages.py)."""

from __future__ import annotations

import re
from pathlib import Path

from thinwire.base.version import __version__

project = "Thinwire"
author = copyright = "The Thinwire authors"
version = release = __version__
extensions = [
    "myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode", "sphinx_copybutton"
]  # fmt: skip
html_theme = "furo"
html_title = f"Thinwire {version}"
html_theme_options = {"top_of_page_buttons": ["view"]}  # of a page's Markdown, which html_copy_source brings along
html_static_path = ["static"]
html_css_files = ["site.css"]
html_copy_source = True
copybutton_prompt_text = "$ "
copybutton_exclude = ".linenos, .gp, .go"
exclude_patterns = ["data/*.*"]
highlight_language = "text"
myst_heading_anchors = 4
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 88
autodoc_mock_imports = ["accelerate", "lightning", "transformers"]

PLACES = {
    "docs/": "", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md", "README.md": "index.md",
    "examples/": "../examples/", "LICENSE": "../LICENSE",
}  # fmt: skip
"""What lies beside README -> where it is seen from the pages of this folder."""


def title(link: re.Match[str]) -> str:
    """The title of the page that ``link`` shows the file of, to its colon."""
    heading = (Path(__file__).parent / f"{link[1]}.md").read_text().partition("\n")[0]
    return f"[{heading.removeprefix('# ').partition(':')[0]}]"


def from_above(app, relative_path, parent_docname, content: list[str]) -> None:
    """Links of README and its like, which are written where they lie, in a page that includes them.

    A link that shows a page's file shows its title here. A paragraph of one line that sends to that very page is left
    out of it.
    """
    content[0] = re.sub(rf"\n[^\n]*\]\(docs/{parent_docname}\.md\)[^\n]*\n(?=\n)", "", content[0])
    content[0] = re.sub(r"\[docs/([\w-]+)\.md\](?=\(docs/\1\.md\))", title, content[0])
    for here, there in PLACES.items():
        content[0] = re.sub(rf"(?<=\]\(){re.escape(here)}", there, content[0])


def apart(app, docname: str, content: list[str]) -> None:
    """The papers' reports are pages that papers.md links to; no table of contents lists them.

    A hyphen at which no line ends holds "figure-1" together in a title. Links that show a page's file show its title.
    """
    content[0] = re.sub(r"\[([\w/-]+)\.md\](?=\(\1\.md[#)])", title, content[0])
    if docname.startswith("data/papers/"):
        content[0] = f"---\norphan: true\n---\n\n{NUMBERED.sub(BOUND, content[0], count=1)}"


def plain(app, what, name, obj, options, lines: list[str]) -> None:
    """Docstrings are plain text: of reStructuredText they have ``code``, roles, lists, and blocks that stay as written.

    A module's block is what is indented; elsewhere (where "Args:" has indented lines, too) what follows a colon and an
    empty line.
    """
    block = False
    for i, line in enumerate(lines):
        if line and not line.startswith("    "):
            block = False
        elif line and i > 1 and not lines[i - 1] and lines[i - 2].endswith(":") and not lines[i - 2].startswith(" "):
            block = True
            if what != "module":
                lines[i - 2] += ":"
        if block or (what == "module" and line.startswith("    ")):
            continue
        pieces = re.split(r"(``.+?``|:\w+:`[^`]+`|^\s*\* )", line)
        lines[i] = "".join(piece if k % 2 else MARK.sub(r"\\\g<0>", piece) for k, piece in enumerate(pieces))
    if what == "module":
        lines[:] = re.sub(r"\n\n(?=    )", "\n\n::\n\n", "\n".join(lines)).split("\n")


def whole(app, what, name, obj, options, lines: list[str]) -> None:
    """Of an attribute's docstring, napoleon takes what stands before the first colon for a type."""
    if what not in ("attribute", "data", "property"):
        return
    for line in [line for line in lines if line.startswith(":type: ")]:
        lines.remove(line)
        lines[0] = f"{line.removeprefix(':type: ')}: {lines[0]}"


def of_its_type(app, what, name, obj, options, signature: str | None, returns: str | None):
    """In a signature a knob has its type; its range is a function, of which nobody can read more than an address.

    A default that is made or a function is no Python: the types beside it would be left as they are.
    """
    return (MADE.sub("...", RANGE.sub(r"\1", signature)), returns) if signature else None


def room(cell: re.Match[str]) -> str:
    """The cell, with the number of its letters for static/site.css."""
    return f'<td style="--letters: {len(re.sub("<.*?>", "", cell[1]))}">{cell[1]}</td>'


def unbroken(app, pagename, templatename, context, doctree) -> None:
    """Marks what static/site.css keeps whole, lets break or gives room.

    Browsers break a flag after each of its hyphens. Words of code that are too long for a line of a phone may be
    broken; flags in a block of commands may not. Cells of many letters get a wider column.
    """
    if "body" not in context:
        return
    body = re.sub(r'(?<=<span class="pre)(?=">[^<]{29,}</span>)', " long", context["body"])
    body = re.sub(r"<td>(<p>.*?</p>)</td>", room, body, flags=re.DOTALL)
    context["body"] = COMMANDS.sub(lambda block: FLAG.sub(r'<span class="flag">\g<0></span>', block[0]), body)


COMMANDS = re.compile(r'<div class="highlight-(?:ba)?sh .*?</pre>', re.DOTALL)
FLAG = re.compile(r"(?<![^\s>(\[])--?(?:[A-Za-z](?:[\w-]*\w)?|(?=[\s<]))")
RANGE = re.compile(
    r"(?:typing\.)?Annotated\[(.+?), Within\((?:holds=<function .+? at 0x[0-9a-f]+>, words=|lambda .+?, )"
    r"""(?:'[^']*'|"[^"]*")\)\]"""
)
MADE = re.compile(r"<factory>|<function [\w.]*<lambda>(?: at 0x[0-9a-f]+)?>")
NUMBERED, BOUND = re.compile(r"^(# .*(?:figure|table))-(?=\d+:)"), "\\1\u2011"
MARK = re.compile(r"[|`]|\*(?=\S)|(?<=\w)_(?!\w)")


def setup(app) -> None:
    app.connect("source-read", apart)
    app.connect("include-read", from_above)
    app.connect("html-page-context", unbroken)
    app.connect("autodoc-process-docstring", plain, priority=400)  # before napoleon makes its own marks
    app.connect("autodoc-process-docstring", whole, priority=600)
    app.connect("autodoc-process-signature", of_its_type)
