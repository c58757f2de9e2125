"""List the configurations of this project, or print what the files say about some.

    swinv2-moe configs
    swinv2-moe configs imagenette_96 tiny_imagenet/8expert

Every name can be given to --cfg, and to `swinv2-moe detect` those below detection/.
"""

import re
from pathlib import Path

from swinv2_moe.commands.options import CommandParser
from swinv2_moe.config.load import comment, config_names, find_config
from swinv2_moe.output import print_lines
from swinv2_moe.tables import Console

# Not experiments: recipes that other configurations start from, and plans of examples/sweep.py
_PARTS = ("ablations/", "detection/_base_/")
_TOP_1 = re.compile(r"Accuracy.*?(?:top-1 (\d+\.\d+)|(\d+\.\d+)% top-1)")


def main() -> None:
    parser = CommandParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="default: all, a line each")
    parser.add_argument(
        "--markdown", action="store_true", help="the table of docs/reference/models.md"
    )
    args = parser.parse_args()
    if args.markdown:
        from swinv2_moe.measure import model_table

        print_lines(*model_table.markdown(model_table.rows()).splitlines())
        return
    console = Console()
    for name in args.names:
        path = find_config(name)
        console.print(path)
        lines = "\n".join(f"  {line}" for line in comment(path))
        console.print(*lines.split("\n"))
    if args.names:
        return
    files = {}
    for name, path in config_names().items():
        if not name.startswith(_PARTS) and not name.endswith("recipe"):
            files[name] = path
    width = max(map(len, files))
    console.print(
        f"{'':{width}}  top-1           in % of the validation images of the data set, published or"
        " measured here (`configs NAME` says on what; sizes: docs/reference/models.md)"
    )
    for name, path in files.items():
        title = " ".join(comment(path)[:1])
        console.print(f"{name:{width}}  {top_1(path):15}  {title}")


def top_1(path: Path) -> str:
    """Top-1 accuracy in percent and its origin, from the head of a configuration; empty if it has
    none."""
    for line in comment(path):
        match = _TOP_1.match(line)
        if match:
            origin = "measured"
            if "published" in line:
                origin = "published"
            return f"{match[1] or match[2]:>5} {origin}"
    return ""
