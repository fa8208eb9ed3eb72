"""Whether two short mathematical answers have the same value: a rule that needs no library, never hangs and never guesses.

Answers are compared as text, then as numbers where both can be read as arithmetic: LaTeX fractions, roots, powers and pi, with
or without dollars and ``\\boxed``. An answer that cannot be read equals nothing but its own text.
"""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Callable, Mapping

from mmrl.rewards import same_answer

MAX_CHARACTERS = 200
"""Longer texts are not read as arithmetic."""
MAX_EXPONENT = 64.0
_REMOVED = re.compile(r"\\left|\\right|\\displaystyle|\\[,;:! ]|\^\{?\\circ\}?|°|\\?%|\$|\\\(|\\\)|\\\[|\\\]")
_WRAPPED = re.compile(r"\\(?:boxed|text|mathrm|mathbf|textbf|mathit)\s*\{([^{}]*)\}")
_FRACTION = re.compile(r"\\[dt]?frac\s*(?:\{([^{}]*)\}|(\d))\s*(?:\{([^{}]*)\}|(\d))")
_ROOT = re.compile(r"\\sqrt\s*(?:\[(\d+)\])?\s*(?:\{([^{}]*)\}|(\d))")
_POWER = re.compile(r"\^\s*\{([^{}]*)\}")
_OPERATORS: Mapping[type[ast.AST], Callable[..., float]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.UAdd: operator.pos, ast.USub: operator.neg,
}  # fmt: skip


def same_value(given: str, expected: str) -> bool:
    """Whether ``given`` and ``expected`` are the same text or, to a millionth, the same number; whole numbers must be equal."""
    if same_answer(given, expected) or same_answer(plain_answer(given), plain_answer(expected)):
        return True
    left, right = value_of(given), value_of(expected)
    if left is None or right is None:
        return False
    if left.is_integer() and right.is_integer():
        return left == right
    return math.isclose(left, right, rel_tol=1e-6, abs_tol=1e-15)


def plain_answer(answer: str) -> str:
    """The answer without dollars, boxes, spacing, units of degree or per cent, and without a variable in front: ``x = 3``."""
    text = answer
    for _ in range(4):  # boxes inside of boxes
        text = _WRAPPED.sub(r"\1", text)
    text = _REMOVED.sub("", text).strip().rstrip(".")
    return re.sub(r"^\s*[A-Za-z]\s*=(?!=)", "", text).strip()


def value_of(answer: str) -> float | None:
    """The number that an answer writes, or None if it is no arithmetic."""
    text = plain_answer(answer)
    if not text or len(text) > MAX_CHARACTERS:
        return None
    text = re.sub(r"(?<=\d),(?=\d{3}(\D|$))", "", text)
    previous = ""
    while previous != text:  # innermost first
        previous = text
        text = _FRACTION.sub(lambda m: f"((({m[1] or m[2]}))/(({m[3] or m[4]})))", text)
        text = _ROOT.sub(lambda m: f"(({m[2] or m[3]})**(1/{m[1] or 2}))", text)
        text = _POWER.sub(r"**(\1)", text)
    text = text.replace("\\pi", "pi").replace("π", "pi").replace("\\cdot", "*").replace("\\times", "*").replace("^", "**")
    text = re.sub(r"(?<=[\d)])\s*(?=pi|\()", "*", re.sub(r"(?<=pi)\s*(?=[\d(])", "*", text))
    if not re.fullmatch(r"(?:[\d.+\-*/() ]|pi)+", text):
        return None
    try:
        value = _evaluate(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ArithmeticError, ValueError, RecursionError, MemoryError):  # not arithmetic after all
        return None
    return value if isinstance(value, float) and math.isfinite(value) else None


def _evaluate(node: ast.expr) -> float:
    if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
        return float(node.value)
    if isinstance(node, ast.Name) and node.id == "pi":
        return math.pi
    if isinstance(node, ast.UnaryOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_evaluate(node.operand))
    if isinstance(node, ast.BinOp):
        left, right = _evaluate(node.left), _evaluate(node.right)
        if isinstance(node.op, ast.Pow) and abs(right) <= MAX_EXPONENT:
            return left**right
        if type(node.op) in _OPERATORS:
            return _OPERATORS[type(node.op)](left, right)
    raise ValueError(f"{ast.dump(node):.40} is no arithmetic on numbers.")
