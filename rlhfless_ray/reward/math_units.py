"""Numbers with units: `5 L`, `20 \\text{ cm}^2`, `\\$1.5 million`, `50%`, `18 apples`.

Text here has the notation of `normalize_notation`.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from fractions import Fraction

from rlhfless_ray.reward.math_notation import FUNCTIONS, TABLES, plain_words

Unit = tuple[Fraction, tuple[tuple[str, int], ...]]  # size in base units, and the base units with their powers

_MAGNITUDES: dict[str, int] = TABLES["magnitudes"]
_UNITS: dict[str, Unit] = {
    name: (Fraction(size), (("m", 3),) if base == "m^3" else ((base, 1),) if base else ())
    for base, sizes in TABLES["units"].items()
    for names, size in sizes.items()
    for name in names.split()
}
_UNITS |= {"mph": (Fraction("0.44704"), (("m", 1), ("s", -1))), "kph": (Fraction(5, 18), (("m", 1), ("s", -1)))}
_POWERS = {"square": 2, "sq": 2, "cubic": 3, "cu": 3}
_CURRENCIES: dict[str, str] = TABLES["currencies"]
_PERCENT = {"%", "percent", "percentage", "pct"}
_CHANGES = {*TABLES["changing"].split(), *_MAGNITUDES, *FUNCTIONS}
_WORD = r"(?:\\text ?\{[^{}]*\}|[A-Za-z]+(?![A-Za-z])|%|\^\\circ ?(?:[CF](?![A-Za-z]))?)"
_POWER = r"(?: ?\^ ?(?:-?\d|\{ ?-?\d ?\}))?"
_TAIL = re.compile(rf"{_WORD}\.?{_POWER}(?: ?(?:/|\\cdot)? ?{_WORD}\.?{_POWER})*")
_TAIL_STARTS = re.compile(r"\\text ?\{|(?<![A-Za-z\\])[A-Za-z]|%|\^\\circ")
_LEAD = re.compile(r"((?:\\text ?\{[^{}0-9]*\}|[A-Za-z]{2,}(?![A-Za-z])) ?[:=]? ?)+(?=[-+]?(?:\d|\.\d|\\frac|\\sqrt|\\USD|[€£¥₹(]))")
_CURRENCY = re.compile(r"([-+]?) ?(\\USD|[€£¥₹]|Rs\.?|USD|EUR) ?([-+]?.*)", re.DOTALL)
_MAX_CHARS = 300  # of a text whose end may be a unit
_NUMBER_WORDS = {word: value for value, word in enumerate(TABLES["numbers"].split())}
_NUMBER_WORDS |= {word: 10 * tens for tens, word in enumerate(TABLES["tens"].split(), 2)}


@dataclass(frozen=True)
class Quantity:
    """A value's text with what stood around it."""

    value: str
    unit: Unit | None = None  # None: no unit, or words that are not known as one
    scale: int = 1  # from words: 10^6 for `million`
    is_percent: bool = False


def read_quantity(text: str) -> Quantity:
    """Separate a value from its currency, words of magnitude and unit. Text that is not so built is all value."""
    if (number := number_from_words(text)) is not None:
        return Quantity(str(number))
    if len(text) > _MAX_CHARS:
        return Quantity(text)
    lead = _LEAD.match(text)
    if lead and not _CHANGES & set(plain_words(lead[0]).lower().replace(":", " ").split()):
        text = text[lead.end() :]
    currency = None
    if match := _CURRENCY.fullmatch(text):
        text, currency = match[1] + match[3], _UNITS[_CURRENCIES.get(match[2], match[2].rstrip("."))]
    value, tail, has_gap = _split_tail(text)
    words = re.sub(r"(?<=\d)(?=[a-z])", " ", plain_words(tail)).replace("per cent", "percent").split()
    scale = 1
    while words and words[0].rstrip("s") in _MAGNITUDES and scale < 10**30:
        scale *= _MAGNITUDES[words.pop(0).rstrip("s")]
    is_percent = bool(words) and words[0] in _PERCENT
    rest = " ".join(words[is_percent:])
    unit = _read_unit(rest, has_gap or scale > 1) if rest else None
    if rest and unit is None:
        is_apart = has_gap or tail.startswith("\\text") or scale > 1 or is_percent
        if not (is_apart and _is_noise(rest, tail)):
            return Quantity(text, currency)
    return Quantity(value, unit or currency, scale, is_percent)


def _split_tail(text: str) -> tuple[str, str, bool]:
    """Return the value, the words after it, and whether a space or `\\text` separates them."""
    if currency := re.fullmatch(r"(.*\d) ?(\\USD|[€£¥₹])", text):
        return currency[1], _CURRENCIES[currency[2]], True
    for start in _TAIL_STARTS.finditer(text):
        value, tail = text[: start.start()], text[start.start() :]
        bare = value.rstrip()
        if not re.search(r"\d|\\pi", value) or not re.search(r"[\d})!\]|]$|\\pi$", bare) or re.search(r"\\frac$|[\^_] ?\{?$", bare):
            continue
        if not _TAIL.fullmatch(tail) or (tail.startswith("^") and re.search(r"sin|cos|tan|cot|sec|csc", value)):
            continue
        return bare, tail, value != bare or tail.startswith("\\text")
    return text, "", False


def _is_noise(words: str, tail: str) -> bool:
    """Return whether words that are not a known unit may be left out: they look like words and do not change the value."""
    each = re.findall(r"[^\W\d_]+", words.lower())
    if not each or _CHANGES & set(each) or re.search(r"\d", words):
        return False
    if "\\text" in tail:
        return True
    return len(each[0]) >= 3 and all(re.search("[aeiouy]", word) for word in each) and not set(each[0]) <= set("xyz")


def _read_unit(text: str, has_gap: bool) -> Unit | None:
    """Return the unit, or None if a word of it is not known. A letter directly after a number is a unit only for `L`."""
    if re.fullmatch(r"[A-Za-z]", text) and not has_gap and text != "L":
        return None
    text = text.replace("\\cdot", "*").replace("^\\circ", " degree ")
    text = re.sub(r"\b([ap])\. ?m\b\.?", r"\1m", text, flags=re.IGNORECASE)
    text = re.sub(r"degrees? *(celsius|fahrenheit|[CF]\b)", r"\1", text, flags=re.IGNORECASE)
    size, powers, sign, pending = Fraction(1), Counter[str](), 1, 1
    for token in re.findall(r"[A-Za-z]+(?: ?\^ ?\{? ?-?\d ?\}?)?|/|\S", text):
        if token in ("/", "per"):
            sign = -1
        elif token.lower() in _POWERS:
            pending = _POWERS[token.lower()]
        elif token not in ("*", ".", "a"):
            match = re.fullmatch(r"([A-Za-z]+)(?: ?\^ ?\{? ?(-?\d) ?\}?)?", token)
            known = _known_unit(match[1]) if match else None
            if match is None or known is None:
                return None
            power = sign * pending * int(match[2] or 1)
            pending = 1
            size *= known[0] ** power
            for base, count in known[1]:
                powers[base] += count * power
    return size, tuple(sorted((base, power) for base, power in powers.items() if power))


def _known_unit(name: str) -> Unit | None:
    lower = name.lower() if len(name) > 2 else name
    return next((_UNITS[each] for each in (name, lower, lower[:-1] if lower[2:].endswith("s") else name) if each in _UNITS), None)


def number_from_words(text: str) -> int | None:
    """Return the value of `twenty-five` or `two thousand`, or None for other text."""
    words = plain_words(text).lower().replace("-", " ").split() if len(text) < 100 else []
    if not words or not (words[0] in _NUMBER_WORDS or (words[0] in ("a", *_MAGNITUDES) and len(words) <= 2)):
        return None
    total = part = 0
    for word in words:
        if word in _NUMBER_WORDS:
            if part % 100 and (part % 10 or _NUMBER_WORDS[word] > 9):
                return None  # `one two`
            part += _NUMBER_WORDS[word]
        elif word == "hundred":
            part = max(part, 1) * 100
        elif word in _MAGNITUDES:
            total, part = total + max(part, 1) * _MAGNITUDES[word], 0
        elif word not in ("and", "a") or word == words[-1]:
            return None
    return total + part
