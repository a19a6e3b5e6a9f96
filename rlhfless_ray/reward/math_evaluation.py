"""Evaluate an expression exactly where it is rational, else with 1,200 bits at fixed points.

All work is bounded, by the size of numbers and the number of operations. `TooLarge` says that a bound was met.
"""

from __future__ import annotations

import math
import zlib
from fractions import Fraction
from functools import lru_cache
from typing import Any

from rlhfless_ray.reward.math_expression import REAL_FUNCTIONS, Node, TooLarge, UnreadableExpression

MAX_BITS = 1 << 17  # of an exact number: 39,000 digits
MAX_WORK = 8000  # operations on one side; a function counts 40, a large exact number more
PRECISION_BITS = 1200
ZERO_BITS = 1000  # a sum smaller than its parts by so much is zero
MAX_EXPONENT_BITS = 10**6  # of a number that is not exact


Number = Any  # a Fraction, or a number of mpmath, which has no types


@lru_cache(1)
def _context() -> Any:
    """Return a context of our own, so that the precision of mpmath's global one stays as it is."""
    import mpmath

    context = mpmath.MPContext()
    context.prec = PRECISION_BITS
    return context


@lru_cache(1024)
def _at_point(name: str, point: int) -> Number:
    """Return a variable's irrational number from 1.2 to 2.4: positive at the points 0 and 1, negative at 2, of either sign at others."""
    seed = zlib.crc32(f"{name} {point}".encode())
    size = _context().sqrt(seed % 999983 + 400000) / 500
    return -size if point == 2 or (point > 2 and seed % 2 == 0) else size


class ExpressionEvaluation:
    """Evaluate trees within `MAX_WORK` in all. Values are Fractions where they are exact, else numbers of mpmath."""

    def __init__(self) -> None:
        self.point, self.left = 0, MAX_WORK
        self.known: dict[tuple[Node, int], Number] = {}

    def at(self, tree: Node, point: int) -> Number:
        """Return the value at a point, None if there is none. Raises TooLarge."""
        if (tree, point) not in self.known:
            self.point = point
            try:
                self.known[tree, point] = self.value(tree)
            except UnreadableExpression:
                self.known[tree, point] = None
        return self.known[tree, point]

    def value(self, tree: Node) -> Number:
        self.spend(1)
        return tree[1] if tree[0] == "number" else self.checked(getattr(self, f"_{tree[0]}")(*tree[1:]))

    def spend(self, work: int) -> None:
        self.left -= work
        if self.left < 0:
            raise TooLarge("the expression takes too much work")

    def checked(self, value: Number) -> Number:
        """Return the value if it is finite and small enough to go on with."""
        if isinstance(value, Fraction):
            bits = value.numerator.bit_length() + value.denominator.bit_length()
            self.spend(bits >> 9)
            if bits > 2 * MAX_BITS:
                raise TooLarge("the number has too many digits")
            return value
        context = _context()
        if not context.isfinite(value):
            raise UnreadableExpression("the expression has no finite value")
        if value and abs(context.mag(value)) > MAX_EXPONENT_BITS:
            raise TooLarge("the value is too large or too small")
        return value

    def _variable(self, name: str) -> Number:
        return _at_point(name, self.point)

    def _constant(self, name: str) -> Number:
        context = _context()
        return context.mpc(0, 1) if name == "i" else +getattr(context, name)

    def _degree(self) -> Number:
        return _context().pi / 180

    def _negative(self, part: Node) -> Number:
        return -self.value(part)

    def _sum(self, *parts: Node) -> Number:
        total: Number = Fraction(0)
        for part in parts:
            before, total = total, total + self.value(part)  # mpmath adds and multiplies Fractions, too
            if before and total and not isinstance(total, Fraction) and _context().mag(total) < _context().mag(before) - ZERO_BITS:
                total = Fraction(0)
            self.checked(total)
        return total

    def _product(self, *parts: Node) -> Number:
        total: Number = Fraction(1)
        for part in parts:
            total = self.checked(total * self.value(part))
        return total

    def _inverse(self, part: Node) -> Number:
        value = self.value(part)
        if value == 0:
            raise UnreadableExpression("a division by zero")
        return 1 / value

    def _power(self, base_tree: Node, exponent_tree: Node) -> Number:
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
        return Fraction(base**exponent)

    def inexact_power(self, base: Number, exponent: Number) -> Number:
        if base == 0:
            raise UnreadableExpression("a power of zero")
        base, exponent = approximate(base), approximate(exponent)
        self.spend(40)
        if abs(exponent) * (abs(_context().mag(base)) + 2) > MAX_EXPONENT_BITS:
            raise TooLarge("the power is too large")
        return base**exponent

    def _root(self, part: Node, index_tree: Node) -> Number:
        value, index = self.value(part), self.value(index_tree)
        if not isinstance(index, Fraction) or index.denominator != 1 or not 1 < index < 64:
            return self.inexact_power(value, self._inverse(index_tree))
        return self.root(value, index.numerator)

    def root(self, value: Number, index: int) -> Number:
        """Return the real root of a real number where there is one, exactly where it is rational."""
        self.spend(10)
        if is_real(value) and value < 0 and index % 2:
            return -self.root(-value, index)
        if isinstance(value, Fraction) and value > 0:
            exact = [_integer_root(part, index) for part in (value.numerator, value.denominator)]
            if exact[0] and exact[1]:
                return Fraction(exact[0], exact[1])
        return _context().root(approximate(value), index)

    def _factorial(self, part: Node) -> Number:
        value = self.value(part)
        if not _is_whole(value) or value < 0:
            return self.function("factorial", 800, 10, value)
        if value > 5000:
            raise TooLarge("the factorial is too large")
        return Fraction(math.factorial(value.numerator))

    def _binomial(self, above_tree: Node, below_tree: Node) -> Number:
        above, below = self.value(above_tree), self.value(below_tree)
        if _is_whole(above) and _is_whole(below) and 0 <= below <= above:
            if min(below, above - below) * above.numerator.bit_length() > MAX_BITS // 4:
                raise TooLarge("the binomial coefficient is too large")
            return Fraction(math.comb(above.numerator, below.numerator))
        if not _is_whole(below) or not 0 <= below <= 50:
            return self.function("binomial", 1500, 10, above, below)
        total: Number = Fraction(1)
        for i in range(int(below)):
            total = self.checked(total * (above - i) / (i + 1))
        return total

    def _call(self, name: str, argument: Node) -> Number:
        value, context = self.value(argument), _context()
        if name == "abs":
            return abs(value)
        if name in ("lfloor", "lceil"):
            if not is_real(value):
                raise UnreadableExpression("a complex number has no floor")
            value = value if name == "lfloor" else -value
            floor = math.floor(value) if isinstance(value, Fraction) else int(context.floor(value + context.ldexp(1, -ZERO_BITS)))
            return Fraction(floor if name == "lfloor" else -floor)
        if name == "lg":
            return self.function("log", 40, 200, value, Fraction(10))
        result = self.function(REAL_FUNCTIONS[name], 40, 19 if name in ("exp", "sinh", "cosh", "tanh", "coth") else 200, value)
        if result and context.mag(result) > ZERO_BITS and name in ("tan", "cot", "sec", "csc"):
            raise UnreadableExpression(f"{name} has no value there")
        return Fraction(0) if result and context.mag(result) < -ZERO_BITS else result

    def function(self, name: str, work: int, limit_bits: int, *values: Number) -> Number:
        """Call a function of mpmath with numbers below a limit."""
        self.spend(work)
        if any(value and _context().mag(value) > limit_bits for value in values):
            raise TooLarge(f"the argument of {name} is too large")
        try:
            return getattr(_context(), name)(*map(approximate, values))
        except (ValueError, ZeroDivisionError):
            raise UnreadableExpression(f"{name} has no value there") from None


def approximate(value: Number) -> Number:
    """Return the value as a number of mpmath."""
    return _context().mpf(value.numerator) / value.denominator if isinstance(value, Fraction) else value


def is_real(value: object) -> bool:
    """Return whether no complex number was met on the way to a value."""
    return isinstance(value, (Fraction, _context().mpf))


def _is_whole(value: object) -> bool:
    return isinstance(value, Fraction) and value.denominator == 1


def _integer_root(value: int, index: int) -> int | None:
    """Return the exact root of a positive integer, or None."""
    with _context().workprec(value.bit_length() // index + 20):
        root = int(_context().nint(_context().root(value, index)))
    return root if root**index == value else None


def is_equal_value(left: Number, right: Number) -> bool:
    """Compare two values: exactly if both are exact."""
    if left == 0 or right == 0 or (isinstance(left, Fraction) and isinstance(right, Fraction)):
        return bool(left == right)
    return bool(_context().mag(approximate(left) - right) < _context().mag(left) - ZERO_BITS)
