"""How much code a package has: lines of code, files, and functions with many parameters.

    python -m benchmarks.tools.size [FOLDER ...]

A line of code has a token that is not a comment and is not part of a docstring or of an import statement.
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

DEFAULT_FOLDER = Path(__file__).parents[2] / "src/gemmsmith"
MAX_PARAMETERS = 12
_NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def _lines(node: ast.stmt) -> range:
    return range(node.lineno, (node.end_lineno or node.lineno) + 1)


def _is_docstring(node: ast.AST) -> bool:
    """Return whether a statement is a string: a docstring, or the description after a constant."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def code_lines(source: str) -> set[int]:
    """Return the numbers of the lines of code of a file, from 1."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Import, ast.ImportFrom)) or _is_docstring(node):
            assert isinstance(node, ast.stmt)
            lines.difference_update(_lines(node))
    return lines


def many_parameters(source: str) -> Iterator[tuple[str, int]]:
    """Yield the functions of a file with more than MAX_PARAMETERS parameters, and how many they have."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            x = node.args
            count = len(x.posonlyargs + x.args + x.kwonlyargs) + (x.vararg is not None) + (x.kwarg is not None)
            if count > MAX_PARAMETERS:
                yield node.name, count


def main() -> None:
    for folder in [Path(x) for x in sys.argv[1:]] or [DEFAULT_FOLDER]:
        sources = {path.relative_to(folder): path.read_text() for path in sorted(folder.rglob("*.py"))}
        by_part: Counter[str] = Counter()
        files: Counter[str] = Counter()
        for path, source in sources.items():
            part = path.parts[0] if len(path.parts) > 1 else "."
            by_part[part] += len(code_lines(source))
            files[part] += 1
        print(f"{folder}: {by_part.total()} lines of code in {files.total()} files")
        for part, count in by_part.most_common():
            print(f"  {part:16} {count:6} lines {files[part]:4} files")
        for path, source in sources.items():
            for name, count in many_parameters(source):
                print(f"  {path}: {name} has {count} parameters")


if __name__ == "__main__":
    main()
