"""The generated shapes: names of data/make_shapes.py."""

from tool_cases import script

_shapes = script("data/make_shapes")
CLASSES, Options, make_shapes, main = (
    _shapes.CLASSES,
    _shapes.Options,
    _shapes.make_shapes,
    _shapes.main,
)
