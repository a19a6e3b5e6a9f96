"""Read an expression, and evaluate it exactly where it is rational, else with 2,000 bits at fixed points.

All work is bounded: by tokens, depth, the size of numbers and the number of operations. `TooLarge` says that a bound was met.
"""

from __future__ import annotations

import re
import zlib
from fractions import Fraction
from functools import lru_cache
from typing import Any

from rlhfless_ray.reward.math_notation import FUNCTIONS, GREEK

MAX_BITS = 1 << 17  # of an exact number: 39,000 digits
MAX_TOKENS = 1000
MAX_DEPTH = 40
MAX_WORK = 4000  # operations of one evaluation; a function counts 20, a large exact number more
PRECISION_BITS = 2000
ZERO_BITS = 1500  # a sum smaller than its parts by so much is zero
MAX_EXPONENT_BITS = 10**6  # of a number that is not exact
POINTS = 5

Node = tuple[Any, ...]


class UnreadableExpression(ValueError):
    """The text is not an expression of this grammar, or has no value."""


class TooLarge(ValueError):
    """The expression is longer, deeper or larger than what is judged."""


_TOKEN = re.compile(r"\s*(?:(?P<number>\d+(?:\.\d+)?(?:\.\d*)?|\.\d+)|(?P<command>\\(?:[A-Za-z]+|.))|(?P<name>[A-Za-z])|(?P<sign>\S))")
_PLAIN_NAMES = re.compile("|".join(sorted((*FUNCTIONS, "pi", "infty"), key=len, reverse=True)))
_SQUARED_BRACKETS = {"(": ")", "[": "]", "\\{": "\\}"}
_FLOORS = {"\\lfloor": "\\rfloor", "\\lceil": "\\rceil"}
_LITERAL = re.compile(r"[-+]?(?:\d+(?:\.\d*)?|\.\d+)")
_LITERAL_FRACTION = re.compile(r"([-+]?\d+) ?/ ?(\d+)")


def parse_expression(text: str) -> Node:
    """Return the expression's tree. Raises UnreadableExpression or TooLarge."""
    if _LITERAL.fullmatch(text):
        return ("number", _to_fraction(text))
    if (match := _LITERAL_FRACTION.fullmatch(text)) and len(text) < 1000 and int(match[2]):
        return ("number", Fraction(int(match[1]), int(match[2])))
    parser = _Parser(_tokens(text))
    tree = parser.sum()
    if rest := parser.peek():
        raise UnreadableExpression(f"`{rest[0]}` is not expected")
    return tree


def _to_fraction(text: str) -> Fraction:
    if len(text) < 1000:
        return Fraction(text if text[-1] != "." else text[:-1])
    whole, _, decimals = text.lstrip("+-").partition(".")
    digits = whole + decimals
    if len(digits) * 10 > MAX_BITS * 3:
        raise TooLarge("the number has too many digits")
    value = Fraction(_to_int(digits), 10 ** len(decimals))
    return -value if text[0] == "-" else value


def _to_int(digits: str) -> int:
    """Convert digits of any number, which `int` refuses above 4,300."""
    if len(digits) < 1000:
        return int(digits)
    half = len(digits) // 2
    return _to_int(digits[:-half]) * 10**half + _to_int(digits[-half:])


def _tokens(text: str) -> list[tuple[str, str]]:
    tokens: list[tuple[str, str]] = []
    position = 0
    text = text.rstrip()
    while position < len(text):
        if len(tokens) > MAX_TOKENS:
            raise TooLarge("the expression is too long")
        match = _TOKEN.match(text, position)
        assert match is not None and match.lastgroup is not None
        kind, token = match.lastgroup, match[match.lastgroup]
        position = match.end()
        if kind == "number" and token.count(".") > 1:
            raise UnreadableExpression(f"`{token}` is not a number")
        if kind == "name" and (name := _PLAIN_NAMES.match(text, match.start("name"))):
            kind, token, position = "command", f"\\{name[0]}", name.end()
        tokens.append((token, kind))
    return tokens


class _Parser:
    """A recursive descent over the tokens. Juxtaposition multiplies; `1\\frac{1}{2}` and `1 1/2` are mixed numbers."""

    def __init__(self, tokens: list[tuple[str, str]]) -> None:
        self.tokens, self.at, self.depth = tokens, 0, 0
        self.closers: list[str] = []

    def peek(self, ahead: int = 0) -> tuple[str, str] | None:
        return self.tokens[self.at + ahead] if self.at + ahead < len(self.tokens) else None

    def token(self, ahead: int = 0) -> str:
        there = self.peek(ahead)
        return there[0] if there else ""

    def take(self) -> tuple[str, str]:
        there = self.peek()
        if there is None:
            raise UnreadableExpression("the expression ends too early")
        self.at += 1
        return there

    def expect(self, token: str) -> None:
        if self.take()[0] != token:
            raise UnreadableExpression(f"`{token}` is missing")

    def sum(self) -> Node:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise TooLarge("the expression is nested too deeply")
        terms = [self.product()]
        while self.token() in ("+", "-"):
            negative = self.take()[0] == "-"
            term = self.product()
            terms.append(("negative", term) if negative else term)
        self.depth -= 1
        return terms[0] if len(terms) == 1 else ("sum", *terms)

    def product(self) -> Node:
        signs = 0
        while self.token() in ("+", "-"):
            signs += self.take()[0] == "-"
        factors = [self.power()]
        while True:
            token = self.token()
            if token in ("*", "\\cdot"):
                self.take()
                factors.append(self.signed_power())
            elif token == "/":
                self.take()
                factors.append(("inverse", self.signed_power()))
            elif self.starts_factor():
                factors.append(self.power())
            else:
                break
        tree = factors[0] if len(factors) == 1 else ("product", *factors)
        return ("negative", tree) if signs % 2 else tree

    def signed_power(self) -> Node:
        if self.token() in ("+", "-"):
            negative = self.take()[0] == "-"
            return ("negative", self.power()) if negative else self.power()
        return self.power()

    def starts_factor(self) -> bool:
        there = self.peek()
        if there is None or there[0] in self.closers[-1:]:
            return False
        token, kind = there
        if kind == "number":
            if self.tokens[self.at - 1][1] == "number":
                raise UnreadableExpression("two numbers without a sign between them")
            return True
        return kind == "name" or token in ("(", "[", "{", "|") or (kind == "command" and token[1:] in _READ)

    def power(self) -> Node:
        base = self.primary()
        while True:
            token = self.token()
            if token == "!":
                self.take()
                base = ("factorial", base)
            elif token == "^":
                self.take()
                if self.token() == "\\circ":
                    self.take()
                    base = ("product", base, ("degree",))
                else:
                    return ("power", base, self.exponent())
            elif token == "%":
                self.take()
                base = ("product", base, ("number", Fraction(1, 100)))
            else:
                return base

    def exponent(self) -> Node:
        if self.token() in ("+", "-"):
            negative = self.take()[0] == "-"
            return ("negative", self.exponent()) if negative else self.exponent()
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise TooLarge("the powers are nested too deeply")
        tree = self.power()  # `2^3^2` is `2^{3^2}`
        self.depth -= 1
        return tree

    def group(self, closer: str) -> Node:
        self.closers.append(closer)
        tree = self.sum()
        self.expect(closer)
        self.closers.pop()
        return tree

    def argument(self) -> Node:
        """Read the argument of `\\frac` or `\\sqrt`: a group or one sign. A number without braces gives its first digit."""
        token, kind = self.take()
        if token == "{":
            return self.group("}")
        if kind == "number":
            if len(token) > 1:  # `\frac12`
                self.at -= 1
                self.tokens[self.at] = (token[1:], kind)
                if not token.isdigit():
                    raise UnreadableExpression("a decimal without braces")
            return ("number", Fraction(token[0] if token.isdigit() else token))
        self.at -= 1
        return self.primary()

    def primary(self) -> Node:
        token, kind = self.take()
        if kind == "number":
            return self.number(token)
        if kind == "name":
            if token in "fgh" and self.token() == "(":
                raise UnreadableExpression(f"the function `{token}` is not known")
            if token in ("e", "i") and self.token() != "_":
                return ("constant", token)
            return ("variable", token + self.subscript())
        if token == "{":
            return self.group("}")
        if token in _SQUARED_BRACKETS:
            return self.group(_SQUARED_BRACKETS[token])
        if token == "|":
            return ("call", "abs", self.group("|"))
        if token in _FLOORS:
            return ("call", token[1:], self.group(_FLOORS[token]))
        if kind == "command":
            return self.command(token[1:])
        raise UnreadableExpression(f"`{token}` is not expected")

    def number(self, token: str) -> Node:
        if token.endswith(".") and not (token[:-1] and self.token() in ("\\overline", "\\dot", "\\bar")):
            raise UnreadableExpression(f"`{token}` is not a number")
        value = _to_fraction(token)
        if "." in token or self.token() in ("\\overline", "\\dot", "\\bar"):
            if self.token() in ("\\overline", "\\bar", "\\dot"):
                return ("number", self.repeating(token))
        if token.isdigit() and self.token() == "\\frac":
            start = self.at
            self.take()
            above, below = self.argument(), self.argument()
            if above[0] == below[0] == "number" and above[1].denominator == below[1].denominator == 1 and 0 <= above[1] < below[1]:
                return ("number", value + above[1] / below[1])
            self.at = start
        elif token.isdigit() and self.token(0).isdigit() and self.token(1) == "/" and self.token(2).isdigit():
            numerator, denominator = int(self.take()[0]), int(self.tokens[self.at + 1][0])
            self.at += 2
            if not numerator < denominator:
                raise UnreadableExpression("not a mixed number")
            return ("number", value + Fraction(numerator, denominator))
        if self.token() == "_":
            raise UnreadableExpression("a number in another base")
        return ("number", value)

    def repeating(self, token: str) -> Fraction:
        """Read a decimal that repeats: `0.1\\overline{6}`."""
        self.take()
        self.expect("{")
        digits = self.take()[0]
        self.expect("}")
        decimals = token.partition(".")[2]
        if "." not in token or not digits.isdigit() or len(digits) > 1000:
            raise UnreadableExpression("not a repeating decimal")
        return _to_fraction(token) + Fraction(_to_int(digits), (10 ** len(digits) - 1) * 10 ** len(decimals))

    def subscript(self) -> str:
        if self.token() != "_":
            return ""
        self.take()
        if self.token() != "{":
            return "_" + self.take()[0].removeprefix("\\")
        self.take()
        name = "_"
        while self.token() != "}":
            name += self.take()[0].removeprefix("\\")
        self.take()
        return name

    def command(self, name: str) -> Node:
        if name == "frac":
            above = self.argument()
            return ("product", above, ("inverse", self.argument()))
        if name == "binom":
            above = self.argument()
            return ("binomial", above, self.argument())
        if name == "sqrt":
            index: Node = ("number", Fraction(2))
            if self.token() == "[":
                self.take()
                index = self.group("]")
            if (there := self.peek()) and there[1] == "number" and len(there[0]) > 1:
                return ("root", ("number", _to_fraction(self.take()[0])), index)
            return ("root", self.primary() if self.token() == "(" else self.argument(), index)
        if name == "pi":
            return ("constant", "pi")
        if name in GREEK:
            return ("variable", name + self.subscript())
        if name in FUNCTIONS and name not in ("max", "min", "gcd", "lcm"):
            return self.call(name)
        raise UnreadableExpression(f"`\\{name}` is not known")

    def call(self, name: str) -> Node:
        exponent = base = None
        if self.token() == "_":
            self.take()
            base = self.argument()
        if self.token() == "^":
            self.take()
            exponent = self.group("}") if self.token() == "{" and self.take() else self.exponent()
        if self.token() in ("(", "["):
            argument = self.primary()
        else:
            factors = [self.signed_power()]
            while self.starts_factor() and self.token() not in ("(", "[") and self.token()[1:] not in FUNCTIONS - {"sqrt"}:
                factors.append(self.power())
            argument = ("product", *factors)
        tree: Node = ("call", name, argument)
        if base is not None:
            if name != "log":
                raise UnreadableExpression(f"`\\{name}` has no base")
            tree = ("product", ("call", "ln", argument), ("inverse", ("call", "ln", base)))
        if exponent is None:
            return tree
        if exponent == ("negative", ("number", Fraction(1))):
            if name not in ("sin", "cos", "tan", "cot", "sinh", "cosh", "tanh"):
                raise UnreadableExpression(f"`\\{name}^{{-1}}` is not known")
            return ("call", f"arc{name}", argument)
        return ("power", tree, exponent)


_READ = {"frac", "binom", "sqrt", "pi", "lfloor", "lceil", "{", *GREEK, *FUNCTIONS}


def variables(tree: Node) -> set[str]:
    """Return the names of the tree's variables."""
    if tree[0] == "variable":
        return {tree[1]}
    return set().union(*(variables(part) for part in tree[1:] if isinstance(part, tuple)))


@lru_cache(1)
def _context() -> Any:
    """Return a context of our own, so that the precision of mpmath's global one stays as it is."""
    import mpmath

    context = mpmath.MPContext()
    context.prec = PRECISION_BITS
    return context


class ExpressionEvaluation:
    """One evaluation at one point, within `MAX_WORK`. Values are Fractions where they are exact, else numbers of mpmath."""

    def __init__(self, point: int = 0) -> None:
        self.point, self.work = point, 0

    def value(self, tree: Node) -> Any:
        kind = tree[0]
        self.spend(1)
        if kind == "number":
            return tree[1]
        return getattr(self, f"_{kind}")(*tree[1:])

    def spend(self, work: int) -> None:
        self.work += work
        if self.work > MAX_WORK:
            raise TooLarge("the expression takes too much work")

    def exact(self, value: Fraction) -> Fraction:
        """Return the value if it is small enough to go on with."""
        bits = value.numerator.bit_length() + value.denominator.bit_length()
        if bits > 2 * MAX_BITS:
            raise TooLarge("the number has too many digits")
        self.spend(bits >> 9)
        return value

    def approximate(self, value: Any) -> Any:
        return _context().mpf(value.numerator) / value.denominator if isinstance(value, Fraction) else value

    def checked(self, value: Any) -> Any:
        context = _context()
        if not context.isfinite(value):
            raise UnreadableExpression("the expression has no finite value")
        if value and abs(context.mag(value)) > MAX_EXPONENT_BITS:
            raise TooLarge("the value is too large or too small")
        return value

    def _variable(self, name: str) -> Any:
        context = _context()
        seed = zlib.crc32(f"{name} {self.point}".encode())
        size = context.sqrt(context.mpf(seed % 999983 + 400000)) / 500  # irrational, from 1.2 to 2.4
        is_negative = self.point >= 2 and (self.point == 2 or seed % 2 == 0)
        return -size if is_negative else size

    def _constant(self, name: str) -> Any:
        context = _context()
        return +context.pi if name == "pi" else +context.e if name == "e" else context.mpc(0, 1)

    def _degree(self) -> Any:
        return _context().pi / 180

    def _negative(self, part: Node) -> Any:
        return -self.value(part)

    def _sum(self, *parts: Node) -> Any:
        total = self.value(parts[0])
        for part in parts[1:]:
            total = self.add(total, self.value(part))
        return total

    def add(self, left: Any, right: Any) -> Any:
        if isinstance(left, Fraction) and isinstance(right, Fraction):
            return self.exact(left + right)
        context = _context()
        left, right = self.approximate(left), self.approximate(right)
        total = left + right
        if total and left and context.mag(total) < context.mag(left) - ZERO_BITS:
            return Fraction(0)
        return self.checked(total)

    def _product(self, *parts: Node) -> Any:
        total: Any = Fraction(1)
        for part in parts:
            factor = self.value(part)
            if isinstance(total, Fraction) and isinstance(factor, Fraction):
                total = self.exact(total * factor)
            elif total == 0 or factor == 0:
                total = Fraction(0)
            else:
                total = self.checked(self.approximate(total) * self.approximate(factor))
        return total

    def _inverse(self, part: Node) -> Any:
        value = self.value(part)
        if value == 0:
            raise UnreadableExpression("a division by zero")
        return 1 / value

    def _power(self, base_tree: Node, exponent_tree: Node) -> Any:
        base, exponent = self.value(base_tree), self.value(exponent_tree)
        if isinstance(base, Fraction) and isinstance(exponent, Fraction):
            if exponent.denominator == 1:
                return self.integer_power(base, exponent.numerator)
            if exponent.denominator < 64 and (base > 0 or exponent.denominator % 2):
                return self.root(self.integer_power(base, exponent.numerator), exponent.denominator)
        return self.inexact_power(base, exponent)

    def integer_power(self, base: Fraction, exponent: int) -> Fraction:
        if base == 0 and exponent <= 0:
            raise UnreadableExpression("zero to the power of zero or less")
        if abs(base) in (0, 1):
            return base ** (exponent % 2 + 2)
        if abs(exponent) * max(base.numerator.bit_length(), base.denominator.bit_length()) > MAX_BITS:
            raise TooLarge("the power is too large")
        return self.exact(base**exponent)

    def inexact_power(self, base: Any, exponent: Any) -> Any:
        context = _context()
        if base == 0:
            raise UnreadableExpression("a power of zero")
        base, exponent = self.approximate(base), self.approximate(exponent)
        self.spend(20)
        if abs(exponent) * (abs(context.mag(base)) + 2) > MAX_EXPONENT_BITS:
            raise TooLarge("the power is too large")
        return self.checked(base**exponent)

    def _root(self, part: Node, index_tree: Node) -> Any:
        value, index = self.value(part), self.value(index_tree)
        if not isinstance(index, Fraction) or index.denominator != 1 or not 1 < index < 64:
            return self.inexact_power(value, self._inverse(index_tree))
        return self.root(value, index.numerator)

    def root(self, value: Any, index: int) -> Any:
        """Return the real root of a real number where there is one, exactly where it is rational."""
        if value == 0:
            return Fraction(0)
        if isinstance(value, Fraction) and value < 0 and index % 2:
            return -self.root(-value, index)
        if isinstance(value, Fraction) and value > 0:
            exact = [_integer_root(part, index) for part in (value.numerator, value.denominator)]
            if exact[0] and exact[1]:
                return Fraction(exact[0], exact[1])
        self.spend(20)
        context = _context()
        value = self.approximate(value)
        if context.im(value) == 0 and context.re(value) < 0 and index % 2:
            return -context.root(-context.re(value), index)
        return self.checked(context.root(value, index))

    def _factorial(self, part: Node) -> Any:
        import math

        value = self.value(part)
        if isinstance(value, Fraction) and value.denominator == 1 and value >= 0:
            if value > 5000:
                raise TooLarge("the factorial is too large")
            return self.exact(Fraction(math.factorial(value.numerator)))
        return self.gamma(self.add(value, Fraction(1)))

    def gamma(self, value: Any) -> Any:
        self.spend(200)
        value = self.approximate(value)
        context = _context()
        if context.mag(value) > 10 or context.isint(value):
            raise TooLarge("the factorial is too large") if context.mag(value) > 10 else UnreadableExpression("the factorial has no value")
        return self.checked(context.gamma(value))

    def _binomial(self, above_tree: Node, below_tree: Node) -> Any:
        import math

        above, below = self.value(above_tree), self.value(below_tree)
        if (
            isinstance(above, Fraction)
            and isinstance(below, Fraction)
            and above.denominator == below.denominator == 1
            and above >= below >= 0
        ):
            if min(below, above - below) * above.numerator.bit_length() > MAX_BITS:
                raise TooLarge("the binomial coefficient is too large")
            return self.exact(Fraction(math.comb(above.numerator, below.numerator)))
        above, below = self.approximate(above), self.approximate(below)
        parts = [self.gamma(self.add(part, Fraction(1))) for part in (above, below, above - below)]
        return self.checked(parts[0] / parts[1] / parts[2])

    def _call(self, name: str, argument: Node) -> Any:
        value = self.value(argument)
        if name == "abs":
            return abs(value)
        context = _context()
        if name in ("lfloor", "lceil"):
            if isinstance(value, Fraction):
                return Fraction(value.__floor__() if name == "lfloor" else value.__ceil__())
            if context.im(value):
                raise UnreadableExpression("a complex number has no floor")
            tiny = context.ldexp(1, -ZERO_BITS)
            whole = context.floor(value + tiny) if name == "lfloor" else context.ceil(value - tiny)
            return Fraction(int(whole))
        self.spend(20)
        value = self.approximate(value)
        if value and (size := context.mag(value)) > (200 if name not in ("exp", "sinh", "cosh", "tanh", "coth") else 19):
            raise TooLarge(f"the argument of {name} is too large" if size else "")
        try:
            result = _FUNCTION_CALLS[name](context, value)
        except (ValueError, ZeroDivisionError):
            raise UnreadableExpression(f"{name} has no value there") from None
        if result and context.mag(result) < -ZERO_BITS:
            return Fraction(0)
        if result and context.mag(result) > ZERO_BITS and name in ("tan", "cot", "sec", "csc"):
            raise UnreadableExpression(f"{name} has no value there")
        return self.checked(result)


_FUNCTION_CALLS: dict[str, Any] = {
    "log": lambda context, x: context.log(x),
    "lg": lambda context, x: context.log(x, 10),
    **{
        name: (lambda context, x, called=called: getattr(context, called)(x))
        for name, called in {
            "ln": "log", "exp": "exp", **{name: name for name in ("sin", "cos", "tan", "cot", "sec", "csc", "sinh", "cosh", "tanh", "coth")},
            "arcsin": "asin", "arccos": "acos", "arctan": "atan", "arccot": "acot", "arcsinh": "asinh", "arccosh": "acosh", "arctanh": "atanh",
        }.items()
    },
}  # fmt: skip


def _integer_root(value: int, index: int) -> int | None:
    """Return the exact root of a positive integer, or None."""
    import math

    if index == 2:
        root = math.isqrt(value)
    else:
        root = 1 << -(-value.bit_length() // index)  # Newton's method from above
        while (better := ((index - 1) * root + value // root ** (index - 1)) // index) < root:
            root = better
    return root if root**index == value else None


def is_equal_value(left: Any, right: Any) -> bool:
    """Compare two values: exactly if both are exact."""
    if isinstance(left, Fraction) and isinstance(right, Fraction):
        return left == right
    if left == 0 or right == 0:
        return bool(left == right)
    context, evaluation = _context(), ExpressionEvaluation()
    left, right = evaluation.approximate(left), evaluation.approximate(right)
    return bool(left == right or context.mag(left - right) < context.mag(left) - ZERO_BITS)
