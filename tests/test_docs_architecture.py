"""Check that the links of docs/architecture.md lead to the lines on which the named things are
defined.

python -m tests.test_docs_architecture     correct the line numbers in the page
"""

import ast
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "architecture.md"
MEND = "python -m tests.test_docs_architecture corrects the line numbers of the page"

# [`dataset/sampler.py: Sampler.examples`](../dataset/sampler.py#L84)
LINK = re.compile(r"\[`(?P<file>[\w/.]+): (?P<name>[\w.]+)`\]\(\.\./(?P<target>[\w/.]+)#L(?P<line>\d+)\)")
LINE_ANCHOR = re.compile(r"#L\d+")


def definitions(tree: ast.Module) -> dict[str, int]:
    """Return the line of each function, class, method and variable at the top level of a module."""
    lines: dict[str, int] = {}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            lines[node.name] = node.lineno
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            lines |= {target.id: node.lineno for target in targets if isinstance(target, ast.Name)}
        if isinstance(node, ast.ClassDef):
            methods = [inner for inner in node.body if isinstance(inner, ast.FunctionDef)]
            lines |= {f"{node.name}.{method.name}": method.lineno for method in methods}
    return lines


def line_of(link: re.Match[str]) -> int:
    """Return the line that a link should name.

    Raises:
        LookupError: There is no such file, or the file no longer defines the name.
    """
    path = ROOT / link["file"]
    if not path.is_file():
        raise LookupError(f"{PAGE.name} links to {link['file']}, which does not exist; name the file where it is now")
    found = definitions(ast.parse(path.read_text()))
    if link["name"] not in found:
        raise LookupError(
            f"{PAGE.name} says that {link['file']} defines {link['name']}, but it does not; "
            "correct the file and the name in the page, and what the page says about them"
        )
    return found[link["name"]]


def mended(link: re.Match[str]) -> str:
    """Return the link with the file and the line that its text names."""
    return f"[`{link['file']}: {link['name']}`](../{link['file']}#L{line_of(link)})"


LINKS = list(LINK.finditer(PAGE.read_text()))


@pytest.mark.parametrize("link", LINKS, ids=lambda link: f"{link['file']}:{link['name']}")
def test_a_link_names_the_line_of_a_definition(link: re.Match[str]) -> None:
    assert link["target"] == link["file"], MEND
    assert int(link["line"]) == line_of(link), f"{link['name']} is defined on line {line_of(link)} now; {MEND}"


def test_every_link_to_a_line_is_checked() -> None:
    assert len(LINE_ANCHOR.findall(PAGE.read_text())) == len(LINKS), "write links as [`file: name`](../file#L1)"


def test_the_walk_has_fifteen_steps() -> None:
    walk = PAGE.read_text().split("## A batch from file to checkpoint")[1].split("\n## ")[0]
    assert re.findall(r"^(\d+)\. ", walk, re.MULTILINE) == [str(number) for number in range(1, 16)]


PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_between_files_lead_somewhere(page: Path) -> None:
    """A link's file exists, and a Markdown file has the heading that a link names."""
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if target.startswith(("http://", "https://")):
            continue
        name, _, anchor = target.partition("#")
        path = (page.parent / name).resolve() if name else page
        assert path.exists(), f"{page.name} links to {target}, which does not exist"
        if anchor and path.suffix == ".md":
            headings = re.findall(r"^#+ (.+)$", path.read_text(), re.MULTILINE)
            anchors = [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]
            assert anchor in anchors, f"{page.name} links to {target}, but {path.name} has no such heading"


if __name__ == "__main__":
    try:
        PAGE.write_text(LINK.sub(mended, PAGE.read_text()))
    except LookupError as error:
        sys.exit(f"error: {error}")
