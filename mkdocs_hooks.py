"""Hooks of mkdocs.yml: documents also link to files that the site does not have, and the fields of
dataclasses have comments."""

import re
from pathlib import Path

import griffe

from swinv2_moe.config.reference import field_comments

_LINK = re.compile(r"\[([^\]]+)\]\(([^)\s]+)\)")


def on_page_markdown(markdown: str, *, page, config, **_) -> str:
    """Replace links to files outside of docs/, and to folders, by their text and path."""
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


class FieldComments(griffe.Extension):
    """Shows the comments of a dataclass's fields as their descriptions."""

    def on_class(self, *, cls: griffe.Class, **_) -> None:
        if not any("dataclass" in str(decorator.value) for decorator in cls.decorators):
            return
        for name, comment in field_comments(cls.source).items():
            field = cls.members.get(name)
            if field is not None and comment and not field.has_docstring:
                field.docstring = griffe.Docstring(comment, parent=field)
