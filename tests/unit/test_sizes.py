"""Functions and files stay short enough to read at once (CONTRIBUTING.md)."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
FILES = [
    file
    for folder in ("moe_core", "swinv2_moe", "tools", "benchmarks", "data")
    for file in sorted((ROOT / folder).rglob("*.py"))
]
MAX_FILE = 600
MAX_FUNCTION = 80


def test_no_file_is_too_long():
    lengths = {str(file.relative_to(ROOT)): len(file.read_text().splitlines()) for file in FILES}
    assert {name: length for name, length in lengths.items() if length > MAX_FILE} == {}


def test_no_function_is_too_long():
    too_long = {}
    for file in FILES:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = node.end_lineno - node.lineno + 1
                if length > MAX_FUNCTION:
                    too_long[f"{file.relative_to(ROOT)}:{node.name}"] = length
    assert too_long == {}
