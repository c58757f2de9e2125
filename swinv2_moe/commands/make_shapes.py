"""`swinv2-moe make-shapes DIR` runs data/make_shapes.py of this clone."""

import runpy
from pathlib import Path

from swinv2_moe.errors import UserError

_SCRIPT = Path(__file__).parents[2] / "data" / "make_shapes.py"


def main() -> None:
    if not _SCRIPT.is_file():
        raise UserError("make-shapes needs data/make_shapes.py, which only a clone has")
    runpy.run_path(str(_SCRIPT))["main"]()
