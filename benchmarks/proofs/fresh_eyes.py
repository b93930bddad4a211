"""Ten lines of the package, drawn at random, each in its function without its file: which room is it from?

    python benchmarks/proofs/fresh_eyes.py --seed 1             # for a reader who has only CONTRIBUTING
    python benchmarks/proofs/fresh_eyes.py --seed 1 --answers   # where the lines stand

The reader names the package of each line, and what a line of that package may import or touch. A line is drawn from
the lines of code inside functions; up to ``AROUND`` lines of its function are shown on each side, and the function's
head with its docstring. Imports are never drawn.
"""

from __future__ import annotations

import argparse
import ast
import random
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[2] / "src" / "thinwire"
AROUND = 12


def candidates(path: Path) -> list[tuple[ast.AST, int]]:
    """Pair each line of code in a function of ``path`` with its innermost function."""
    pairs: dict[int, ast.AST] = {}
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            # ast.walk goes outside in, so that an inner function replaces its outer one.
            pairs |= {
                line: node
                for statement in node.body
                if not isinstance(statement, ast.Import | ast.ImportFrom)
                and not (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant))
                for line in range(statement.lineno, (statement.end_lineno or statement.lineno) + 1)
            }
    text = path.read_text().splitlines()
    return [(node, line) for line, node in sorted(pairs.items()) if text[line - 1].strip(" )]},:\"'")]


def excerpt(path: Path, function: ast.AST, line: int) -> str:
    """Print the function's head and the lines around ``line``, which is marked."""
    assert isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
    text = path.read_text().splitlines()
    end = function.end_lineno or function.lineno
    body = function.body[1] if ast.get_docstring(function) and len(function.body) > 1 else function.body[0]
    head = range(function.lineno, body.lineno)
    near = range(max(body.lineno, line - AROUND), min(end, line + AROUND) + 1)
    gap = ["     ..."] if near.start > head.stop else []
    shown = [f"     {text[number - 1]}" for number in head] + gap
    return "\n".join(shown + [f"{'  >  ' if number == line else '     '}{text[number - 1]}" for number in near])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--lines", type=int, default=10)
    parser.add_argument("--answers", action="store_true")
    args = parser.parse_args()
    lines = [(path, *pair) for path in sorted(SOURCE.rglob("*.py")) for pair in candidates(path)]
    for number, (path, function, line) in enumerate(random.Random(args.seed).sample(lines, args.lines), 1):
        if args.answers:
            print(f"{number}: {path.relative_to(SOURCE)}:{line}")
        else:
            print(f"\n--- {number} ---\n{excerpt(path, function, line)}")


if __name__ == "__main__":
    main()
