"""Hooks of mkdocs.yml: documents also link to files that the site does not have."""

import re
from pathlib import Path

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
