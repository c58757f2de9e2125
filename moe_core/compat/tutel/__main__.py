"""`python -m moe_core.compat.tutel`: print the directory with the package `tutel`."""

from pathlib import Path

print(Path(__file__).parents[1] / "shim")
