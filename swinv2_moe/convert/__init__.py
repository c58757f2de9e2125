"""Convert weights of other programs to checkpoints of this project and back, and summarize them."""

from swinv2_moe.convert.convert import EXPORTS, IMPORTS, export_weights, import_weights
from swinv2_moe.convert.summary import Summary, summarize

__all__ = ["EXPORTS", "IMPORTS", "Summary", "export_weights", "import_weights", "summarize"]
