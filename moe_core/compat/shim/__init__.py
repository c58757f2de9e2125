"""A directory for PYTHONPATH: the package `tutel` in it is `moe_core.compat.tutel`."""
