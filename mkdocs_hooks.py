"""Hooks of mkdocs.yml: documents also link to files that the site does not have, and the fields of
dataclasses and named tuples have meanings."""

import ast
import re
import textwrap
from pathlib import Path

import griffe

_FIELD = re.compile(r"    (\w+): [^#]*(?:# (.*))?$")
_LINK = re.compile(r"\[([^\]]+)\]\(([^)\s]+)\)")
_CODE = re.compile(r"<code>([^<]*)</code>")
_OPTION = re.compile(r"(?<!\S)--[\w-]+")
_SLASH = re.compile(r"(?<=\w)/(?=\w)")


def on_page_markdown(markdown: str, *, page, config, **_) -> str:
    """Replace links to files outside of docs/, and to folders, by their text and path. Hide the
    sidebar of a section with one page."""
    if "/" not in page.file.src_uri:
        page.meta.setdefault("hide", ["navigation"])
    docs = Path(config.docs_dir).resolve()
    folder = (docs / page.file.src_uri).parent

    def replaced(match: re.Match) -> str:
        text, link = match.groups()
        path = link.partition("#")[0]
        target = (folder / path).resolve()
        is_page = target.is_file() and target.is_relative_to(docs)
        if not path or is_page or not target.exists():
            return match[0]
        name = str(target.relative_to(docs.parent))
        if text.rstrip("/") in name:
            return f"`{name}`"
        return f"{text} (`{name}`)"

    return _LINK.sub(replaced, markdown)


def on_page_content(html: str, **_) -> str:
    """Let code in a line break between words and after a slash, and not inside an option."""

    def breakable(match: re.Match) -> str:
        text = _OPTION.sub(r'<span class="option">\g<0></span>', match[1])
        return f"<code>{_SLASH.sub('/<wbr>', text)}</code>"

    return _CODE.sub(breakable, html)


def field_meanings(source: str) -> dict[str, str]:
    """The meaning of each field in the source of a dataclass: the second argument of `option`, or
    the comment after the field or on the lines before it."""
    by_name = {}
    lines_before = []
    for line in source.splitlines():
        if line.startswith("    # "):
            lines_before.append(line.strip().removeprefix("# "))
            continue
        match = _FIELD.match(line)
        if match:
            by_name[match[1]] = " ".join(lines_before) or match[2] or ""
        lines_before = []
    for node in ast.walk(ast.parse(textwrap.dedent(source))):
        made_by = getattr(getattr(node, "value", None), "func", None)
        if isinstance(node, ast.AnnAssign) and getattr(made_by, "id", "") == "option":
            by_name[node.target.id] = ast.literal_eval(node.value.args[1])
    return by_name


class FieldComments(griffe.Extension):
    """Shows the meanings of the fields of dataclasses and named tuples as their descriptions."""

    def on_class(self, *, cls: griffe.Class, **_) -> None:
        is_dataclass = any("dataclass" in str(decorator.value) for decorator in cls.decorators)
        if not is_dataclass and "NamedTuple" not in map(str, cls.bases):
            return
        for name, comment in field_meanings(cls.source).items():
            field = cls.members.get(name)
            if field is not None and comment and not field.has_docstring:
                field.docstring = griffe.Docstring(comment, parent=field)
