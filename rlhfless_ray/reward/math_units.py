"""Numbers with units: `5 L`, `20 \\text{ cm}^2`, `\\$1.5 million`, `50%`, `18 apples`.

Text here has the notation of `normalize_notation`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

from rlhfless_ray.reward.math_notation import FUNCTIONS, plain_words

Unit = tuple[Fraction, tuple[tuple[str, int], ...]]  # size in base units, and the base units with their powers

_MAGNITUDES = {"hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12, "dozen": 12}
_SIZES: dict[str, dict[str, str]] = {  # base unit → names → size of one
    "m": {
        "m meter meters metre metres": "1", "km kilometer kilometers kilometre kilometres": "1000",
        "cm centimeter centimeters centimetre centimetres": "1/100", "mm millimeter millimeters millimetre millimetres": "1/1000",
        "nm": "1/1000000000", "in inch inches": "0.0254", "ft foot feet": "0.3048", "yd yard yards": "0.9144", "mi mile miles": "1609.344",
    },
    "m^3": {"L l liter liters litre litres": "1/1000", "mL ml milliliter milliliters millilitre millilitres": "1/1000000"},
    "g": {"g gram grams": "1", "kg kilogram kilograms": "1000", "mg milligram milligrams": "1/1000"},
    "s": {
        "s sec secs second seconds": "1", "min mins minute minutes": "60", "h hr hrs hour hours": "3600", "day days": "86400",
        "week weeks": "604800", "ms millisecond milliseconds": "1/1000",
    },
    "month": {"month months": "1", "year years yr yrs": "12"},
    "gallon": {"gal gallon gallons": "1"}, "lb": {"lb lbs": "1"}, "ounce": {"oz ounce ounces": "1"}, "ton": {"ton tons tonne tonnes": "1"},
    "N": {"N newton newtons": "1"}, "J": {"J joule joules": "1", "kJ": "1000"}, "W": {"W watt watts": "1", "kW": "1000"},
    "V": {"V volt volts": "1"}, "K": {"K kelvin": "1"}, "Pa": {"Pa": "1", "kPa": "1000"}, "Hz": {"Hz": "1", "kHz": "1000"},
    "mol": {"mol mole moles": "1"}, "rad": {"rad rads radian radians": "1"}, "degree": {"degree degrees deg": "1"},
    "celsius": {"C celsius": "1"}, "fahrenheit": {"F fahrenheit": "1"}, "byte": {"byte bytes": "1"}, "bit": {"bit bits": "1"},
    "USD": {"USD dollar dollars": "1", "cent cents": "1/100"}, "EUR": {"EUR euro euros": "1"}, "GBP": {"GBP": "1"}, "JPY": {"JPY yen": "1"},
    "CNY": {"CNY yuan RMB": "1"}, "INR": {"INR Rs rupee rupees": "1"}, "": {"unit units": "1"},
}  # fmt: skip
_UNITS: dict[str, Unit] = {
    name: (Fraction(size), (("m", 3),) if base == "m^3" else ((base, 1),) if base else ())
    for base, sizes in _SIZES.items()
    for names, size in sizes.items()
    for name in names.split()
}
_POWERS = {"square": 2, "sq": 2, "cubic": 3, "cu": 3}
_CURRENCIES = {"\\USD": "USD", "€": "EUR", "£": "GBP", "¥": "JPY", "₹": "INR"}
_PERCENT = {"%", "percent", "percentage", "pct"}
# Words that change a value or join two, so they are neither its unit nor its introduction.
_CHANGES = {
    "minus", "negative", "no", "not", "or", "and", "half", "of", "if", "for", "where", "when", "plus", "times", "percent", "over", "mod",
    "base", "with", "to", "by", "from", "than", "less", "more", "squared", "cubed", "pi", "root", "infinity", *_MAGNITUDES, *FUNCTIONS,
}  # fmt: skip
_WORD = r"(?:\\text ?\{[^{}]*\}|[A-Za-z]+(?![A-Za-z])|%|\^\\circ ?(?:[CF](?![A-Za-z]))?)"
_TAIL = re.compile(rf"{_WORD}\.?(?: ?\^ ?\{{? ?-?\d ?\}}?)?(?: ?(?:/|\\cdot)? ?{_WORD}\.?(?: ?\^ ?\{{? ?-?\d ?\}}?)?)*")
_TAIL_STARTS = re.compile(r"\\text ?\{|(?<![A-Za-z\\])[A-Za-z]|%|\^\\circ")
_LEAD = re.compile(r"((?:\\text ?\{[^{}0-9]*\}|[A-Za-z]{2,}(?![A-Za-z])) ?[:=]? ?)+(?=[-+]?(?:\d|\.\d|\\frac|\\sqrt|\\USD|[€£¥₹(]))")
_CURRENCY = re.compile(r"([-+]?) ?(\\USD|[€£¥₹]|Rs\.?|USD|EUR) ?([-+]?.*)", re.DOTALL)
_NUMBER_WORDS = {
    word: value
    for value, word in enumerate(
        [
            "zero",
            "one",
            "two",
            "three",
            "four",
            "five",
            "six",
            "seven",
            "eight",
            "nine",
            "ten",
            "eleven",
            "twelve",
            "thirteen",
            "fourteen",
            "fifteen",
            "sixteen",
            "seventeen",
            "eighteen",
            "nineteen",
        ]
    )
} | {word: 10 * tens for tens, word in enumerate(["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"], 2)}


@dataclass(frozen=True)
class Quantity:
    """A value's text with what stood around it."""

    value: str
    unit: Unit | None = None  # None: no unit, or words that are not known as one
    scale: int = 1  # from words: 10^6 for `million`
    is_percent: bool = False


def read_quantity(text: str) -> Quantity:
    """Separate a value from its currency, words of magnitude and unit. Text that is not so built is all value."""
    if (number := _number_from_words(text)) is not None:
        return Quantity(str(number))
    lead = _LEAD.match(text)
    if lead and not _CHANGES & set(plain_words(lead[0]).lower().replace(":", " ").split()):
        text = text[lead.end() :]
    currency = None
    match = _CURRENCY.fullmatch(text)
    if match:
        text, currency = match[1] + match[3], _UNITS[_CURRENCIES.get(match[2], match[2].rstrip("."))]
    value, tail, has_gap = _split_tail(text) if len(text) < 500 else (text, "", False)
    scale, is_percent, unit = 1, False, currency
    if tail:
        words = re.sub(r"(?<=\d)(?=[a-z])", " ", plain_words(tail)).replace("per cent", "percent").split()
        while words and words[0].rstrip("s") in _MAGNITUDES:
            scale *= _MAGNITUDES[words.pop(0).rstrip("s")]
        if words and words[0] in ("%", *_PERCENT):
            is_percent = True
            words.pop(0)
        rest = " ".join(words)
        known = _read_unit(rest, has_gap or scale > 1) if rest else currency
        if rest and known is None:
            if not _is_noise(rest, tail) or not (has_gap or tail.startswith("\\text") or scale > 1 or is_percent):
                return Quantity(text, currency)
        unit = known or currency
    return Quantity(value, unit, scale, is_percent)


def _split_tail(text: str) -> tuple[str, str, bool]:
    for start in _TAIL_STARTS.finditer(text):
        value = text[: start.start()]
        bare = value.rstrip()
        if not re.search(r"\d|\\pi", value) or not re.search(r"[\d})!\]|]$|\\pi$", bare) or bare.endswith("\\frac"):
            continue
        tail = text[start.start() :]
        if re.search(r"[\^_] ?\{?$", bare) or not _TAIL.fullmatch(tail) or (tail.startswith("^") and _has_function(value)):
            continue
        return bare, tail, value != bare or tail.startswith("\\text")
    currency = re.fullmatch(r"(.*\d) ?(\\USD|[€£¥₹])", text)
    if currency:
        return currency[1], {"\\USD": "USD"}.get(currency[2], _CURRENCIES.get(currency[2], "")), True
    return text, "", False


def _has_function(text: str) -> bool:
    return bool(re.search(r"sin|cos|tan|cot|sec|csc", text))


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
    text = text.replace("\\cdot", "*").replace("^\\circ", " degree ").replace("degree C", "C").replace("degree F", "F")
    text = re.sub(r"degree +([CF])\b", r"\1", text)
    text = re.sub(r"degrees? +(celsius|fahrenheit)", r"\1", text, flags=re.IGNORECASE)
    size, powers, sign, pending = Fraction(1), {}, 1, 1  # type: Fraction, dict[str, int], int, int
    for token in re.findall(r"[A-Za-z]+(?: ?\^ ?\{? ?-?\d ?\}?)?|/|\S", text):
        if token in ("/", "per"):
            sign = -1
            continue
        if token in ("*", ".", "a"):
            continue
        if token.lower() in _POWERS:
            pending = _POWERS[token.lower()]
            continue
        match = re.fullmatch(r"([A-Za-z]+)(?: ?\^ ?\{? ?(-?\d) ?\}?)?", token)
        if match is None:
            return None
        known = _UNITS.get(match[1]) or (_UNITS.get(match[1].lower()) if len(match[1]) > 2 else None)
        if known is None:
            return None
        power = sign * pending * int(match[2] or 1)
        pending = 1
        size *= known[0] ** power
        for base, count in known[1]:
            powers[base] = powers.get(base, 0) + count * power
    return size, tuple(sorted((base, power) for base, power in powers.items() if power))


def _number_from_words(text: str) -> int | None:
    """Return the value of `twenty-five` or `two thousand`, or None for other text."""
    words = plain_words(text).lower().replace("-", " ").split()
    if not words or len(words) > 8:
        return None
    total = part = 0
    for word in words:
        if word in _NUMBER_WORDS:
            part += _NUMBER_WORDS[word]
        elif word == "hundred":
            part = max(part, 1) * 100
        elif word in _MAGNITUDES:
            total, part = total + max(part, 1) * _MAGNITUDES[word], 0
        elif word not in ("and", "a") or word == words[-1]:
            return None
    return total + part if not {"and", "a"} >= set(words) else None
