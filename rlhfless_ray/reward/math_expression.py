"""Read an expression as a tree. `TooLarge` says that it has too many tokens, digits or levels."""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction
from functools import lru_cache
from typing import Any

from rlhfless_ray.reward.math_notation import FUNCTIONS, GREEK

MAX_DIGITS = 4000  # of a number that is written out; Python reads at most 4,300
MAX_TOKENS = 1000
MAX_DEPTH = 40

Node = tuple[Any, ...]


class UnreadableExpression(ValueError):
    """The text is not an expression of this grammar, or has no value."""


class TooLarge(ValueError):
    """The expression is longer, deeper or larger than what is judged."""


_TOKEN = re.compile(
    r"\s*(?:(?P<number>\d+(?:\.\d+)?(?:\.\d*)?|\.\d+)|(?P<command>\\(?:[A-Za-z]+|.))|(?P<name>[A-Za-z])|(?P<sign>\S))", re.DOTALL
)
_PLAIN_NAMES = re.compile("|".join(sorted((*FUNCTIONS, "pi"), key=len, reverse=True)))
_GROUPS = {"{": "}", "(": ")", "[": "]", "\\{": "\\}", "|": "|", "\\lfloor": "\\rfloor", "\\lceil": "\\rceil"}
_CALLS = {"|": "abs", "\\lfloor": "lfloor", "\\lceil": "lceil"}
_REPEATING = ("\\overline", "\\dot", "\\bar")
_FACTORS = {"frac", "binom", "sqrt", "pi", "lfloor", "lceil", "{", *GREEK, *FUNCTIONS}
_INVERTIBLE = ("sin", "cos", "tan", "cot", "sinh", "cosh", "tanh")
REAL_FUNCTIONS = {name: name.replace("arc", "a") for name in FUNCTIONS - {"max", "min", "gcd", "lcm", "sqrt"}} | {
    "ln": "log"
}  # → their names in mpmath
ONE = ("number", Fraction(1))


@lru_cache(512)
def parse_expression(text: str) -> Node:
    """Return the expression's tree. Raises UnreadableExpression or TooLarge."""
    parser = _Parser(_tokens(text))
    tree = parser.sum()
    if parser.at < len(parser.tokens):
        raise UnreadableExpression(f"`{parser.token()}` is not expected")
    return tree


def _tokens(text: str) -> list[tuple[str, str]]:
    tokens: list[tuple[str, str]] = []
    position, text = 0, text.rstrip()
    while position < len(text):
        match = _TOKEN.match(text, position)
        if len(tokens) > MAX_TOKENS or match is None or len(match[0]) > MAX_DIGITS:
            raise TooLarge("the expression is too long")
        kind = match.lastgroup or ""
        token, position = match[kind], match.end()
        if kind == "name" and (name := _PLAIN_NAMES.match(text, match.start("name"))):
            kind, token, position = "command", f"\\{name[0]}", name.end()
        tokens.append((token, kind))
    return tokens


class _Parser:
    """A recursive descent over the tokens. Juxtaposition multiplies; `1\\frac{1}{2}` and `1 1/2` are mixed numbers."""

    def __init__(self, tokens: list[tuple[str, str]]) -> None:
        self.tokens, self.at, self.depth = tokens, 0, 0
        self.closers: list[str] = []

    def token(self, ahead: int = 0) -> str:
        return self.tokens[self.at + ahead][0] if self.at + ahead < len(self.tokens) else ""

    def take(self, *expected: str) -> tuple[str, str]:
        if self.at == len(self.tokens) or (expected and self.token() not in expected):
            raise UnreadableExpression(f"`{' or '.join(expected)}` is missing" if expected else "the expression ends too early")
        self.at += 1
        return self.tokens[self.at - 1]

    def takes(self, *tokens: str) -> bool:
        """Take the next token if it is one of these."""
        is_there = self.at < len(self.tokens) and self.token() in tokens
        self.at += is_there
        return is_there

    def sign(self) -> bool:
        """Take all signs. Returns whether they make a minus."""
        is_negative = False
        while self.token() in ("+", "-"):
            is_negative ^= self.take()[0] == "-"
        return is_negative

    def sum(self) -> Node:
        terms = [self.product()]
        while self.token() in ("+", "-"):
            terms.append(self.product())
        return terms[0] if len(terms) == 1 else ("sum", *terms)

    def product(self) -> Node:
        is_negative = self.sign()
        factors = [self.power()]
        while True:
            if self.takes("*", "\\cdot"):
                factors.append(self.signed(self.power))
            elif self.takes("/"):
                factors.append(("inverse", self.signed(self.power)))
            elif self.starts_factor():
                factors.append(self.power())
            else:
                break
        return _negated(factors[0] if len(factors) == 1 else ("product", *factors), is_negative)

    def signed(self, read: Callable[[], Node]) -> Node:
        is_negative = self.sign()
        return _negated(read(), is_negative)

    def starts_factor(self) -> bool:
        if self.at == len(self.tokens) or self.token() in self.closers[-1:]:
            return False
        token, kind = self.tokens[self.at]
        if kind == "number" and self.tokens[self.at - 1][1] == "number":
            raise UnreadableExpression("two numbers without a sign between them")
        if kind == "number" and self.tokens[self.at - 1][1] == "name":  # `H2O`, seat `B2`, and who means `x^2` by `x2`
            raise UnreadableExpression("a number after a letter")
        return kind in ("number", "name") or token in ("(", "[", "{", "|") or (kind == "command" and token[1:] in _FACTORS)

    def power(self) -> Node:
        base = self.primary()
        while True:
            if self.takes("!"):
                base = ("factorial", base)
            elif self.takes("%"):
                base = ("product", base, ("number", Fraction(1, 100)))
            elif not self.takes("^"):
                return base
            elif self.takes("\\circ"):
                base = ("product", base, ("degree",))
            else:
                return ("power", base, self.exponent())

    def deeper(self, read: Callable[[], Node]) -> Node:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise TooLarge("the expression is nested too deeply")
        tree = read()
        self.depth -= 1
        return tree

    def exponent(self) -> Node:
        return self.signed(lambda: self.deeper(self.power))  # `2^3^2` is `2^{3^2}`

    def group(self, opener: str) -> Node:
        closer = _GROUPS[opener]
        self.closers.append(closer)
        tree = self.sum()
        self.take(closer)
        self.closers.pop()
        return ("call", _CALLS[opener], tree) if opener in _CALLS else tree

    def argument(self) -> Node:
        """Read the argument of `\\frac` or `\\sqrt`: a group or one sign. A number without braces gives its first digit."""
        if self.at < len(self.tokens) and self.tokens[self.at][1] == "number":
            token = self.token()
            if not token.isdigit():
                raise UnreadableExpression("a decimal without braces")
            if len(token) > 1:  # `\frac12`
                self.tokens[self.at] = (token[1:], "number")
            else:
                self.at += 1
            return ("number", Fraction(token[0]))
        return self.primary()

    def primary(self) -> Node:
        token, kind = self.take()
        if kind == "number":
            return ("number", self.number(token))
        if token in _GROUPS:
            return self.deeper(lambda: self.group(token))
        if kind == "command":
            return self.deeper(lambda: self.command(token[1:]))
        if kind != "name" or (token in "fgh" and self.token() == "("):
            raise UnreadableExpression(f"`{token}` is not expected")
        return ("constant", token) if token in "ei" and self.token() != "_" else ("variable", token + self.subscript())

    def number(self, token: str) -> Fraction:
        if token.count(".") > 1 or (token.endswith(".") and self.token() not in _REPEATING) or self.token() == "_":
            raise UnreadableExpression(f"`{token}` is not a number, or one in another base")
        value = Fraction(token)
        if self.takes(*_REPEATING):  # `0.1\overline{6}`
            self.take("{")
            digits, decimals = self.take()[0], token.partition(".")[2]
            self.take("}")
            if "." not in token or not digits.isdigit():
                raise UnreadableExpression("not a repeating decimal")
            return value + Fraction(int(digits), (10 ** len(digits) - 1) * 10 ** len(decimals))
        start = self.at
        if not token.isdigit():
            return value
        if self.takes("\\frac"):
            above, below = self.argument(), self.argument()
            if all(part[0] == "number" and part[1].denominator == 1 for part in (above, below)) and above[1] < below[1]:
                return value + Fraction(above[1] / below[1])
            self.at = start
        elif self.token().isdigit() and self.token(1) == "/" and self.token(2).isdigit():
            numerator, denominator = int(self.token()), int(self.token(2))
            self.at += 3
            if not numerator < denominator:
                raise UnreadableExpression("not a mixed number")
            return value + Fraction(numerator, denominator)
        return value

    def subscript(self) -> str:
        if not self.takes("_"):
            return ""
        name = "_"
        if self.takes("{"):
            while not self.takes("}"):
                name += self.take()[0].removeprefix("\\")
            return name
        return name + self.take()[0].removeprefix("\\")

    def command(self, name: str) -> Node:
        if name in ("frac", "binom"):
            above, below = self.argument(), self.argument()
            return ("product", above, ("inverse", below)) if name == "frac" else ("binomial", above, below)
        if name == "sqrt":
            index: Node = self.group("[") if self.takes("[") else ("number", Fraction(2))
            is_number = self.at < len(self.tokens) and self.tokens[self.at][1] == "number"  # `\sqrt12` has a root of 12
            return ("root", self.primary() if is_number else self.argument(), index)
        if name == "pi":
            return ("constant", "pi")
        if name in GREEK:
            return ("variable", name + self.subscript())
        if name in REAL_FUNCTIONS:
            return self.call(name)
        raise UnreadableExpression(f"`\\{name}` is not known")

    def call(self, name: str) -> Node:
        base = self.argument() if self.takes("_") else None
        exponent = self.exponent() if self.takes("^") else None
        if self.token() in ("(", "["):
            argument = self.primary()
        else:
            factors = [self.signed(self.power)]
            while self.starts_factor() and self.token() not in ("(", "[") and self.token()[1:] not in FUNCTIONS - {"sqrt"}:
                factors.append(self.power())
            argument = ("product", *factors)
        tree: Node = ("call", name, argument)
        if base is not None:
            if name != "log":
                raise UnreadableExpression(f"`\\{name}` has no base")
            tree = ("product", ("call", "ln", argument), ("inverse", ("call", "ln", base)))
        if exponent == ("negative", ONE):
            if name not in _INVERTIBLE:
                raise UnreadableExpression(f"`\\{name}^{{-1}}` is not known")
            return ("call", f"arc{name}", argument)
        return tree if exponent is None else ("power", tree, exponent)


def _negated(tree: Node, is_negative: bool) -> Node:
    return ("negative", tree) if is_negative else tree


def variables(tree: Node) -> set[str]:
    """Return the names of the tree's variables."""
    if tree[0] == "variable":
        return {tree[1]}
    return set().union(*(variables(part) for part in tree[1:] if isinstance(part, tuple)))
