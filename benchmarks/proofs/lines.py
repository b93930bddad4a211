"""Lines of code of the package at two commits, file by file: no comments, no docstrings, no blank lines.

python benchmarks/proofs/lines.py 37bf156 2e22edc
"""

from __future__ import annotations

import argparse
import ast
import io
import subprocess
import tokenize

SOURCE = "src/thinwire/"
NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def lines_of(text: str) -> int:
    """Lines of ``text`` that hold code; a string that is a statement by itself is none."""
    documentation: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            documentation |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in NO_CODE:
            code |= set(range(token.start[0], token.end[0] + 1))
    return len(code - documentation)


def git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], check=True, capture_output=True, text=True).stdout


def package(commit: str) -> dict[str, int]:
    """Lines of code by file."""
    files = git("ls-tree", "-r", "--name-only", commit, SOURCE).split()
    return {
        file.removeprefix(SOURCE): lines_of(git("show", f"{commit}:{file}")) for file in files if file.endswith(".py")
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before")
    parser.add_argument("after")
    args = parser.parse_args()
    before, after = package(args.before), package(args.after)
    print(f"{'':40}{args.before:>10}{args.after:>10}")
    for file in sorted(before | after):
        if (was := before.get(file, 0)) != (now := after.get(file, 0)):
            print(f"{file:40}{was:10}{now:10}{now - was:+8}")
    was, now = sum(before.values()), sum(after.values())
    print(f"{'all, with files that are as they were':40}{was:10}{now:10}{now - was:+8}")


if __name__ == "__main__":
    main()
