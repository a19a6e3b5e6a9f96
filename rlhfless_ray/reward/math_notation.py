"""One notation for answers: the ways to write the same sign, space, number or word become one.

`normalize_notation` does not judge what a text means. It works in time linear in the text's length.
"""

from __future__ import annotations

import re
import unicodedata

from rlhfless_ray.common.data_files import read_data_file

TABLES = read_data_file(__package__, "math_tables.yaml")
FUNCTIONS: set[str] = set(TABLES["functions"].split())
_GREEK: list[str] = TABLES["greek"].split()
GREEK = {*_GREEK, *(name.capitalize() for name in _GREEK), "varepsilon", "varphi", "vartheta", "varrho", "ell", "hbar"}

_SCRIPTS = {"^": str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁼⁽⁾ⁿⁱ", "0123456789+-=()ni"), "_": str.maketrans("₀₁₂₃₄₅₆₇₈₉₊₋₌₍₎", "0123456789+-=()")}
_GLYPHS: dict[str, str] = {glyph: notation for notation, glyphs in TABLES["glyphs"].items() for glyph in glyphs}
_RENAMED: dict[str, str] = {other: name for name, others in TABLES["renamed"].items() for other in others.split()}
_REPLACED: dict[str, str] = {
    **TABLES["replaced"],
    **dict.fromkeys(TABLES["dropped"].split(), " "),
    **dict.fromkeys(TABLES["text"].split(), "\\text"),
}
_COMMAND = re.compile(r"\\(?:([A-Za-z]+)(?:\s*\*(?=\s*\{))?|(.))", re.DOTALL)
_TEXT_BLOCK = re.compile(r"\\text\s*\{([^{}]*(?:\{[^{}]*\}[^{}]*)*)\}")
_UNIT_FRACTION = re.compile(rf"\\frac\s*\{{\s*({_TEXT_BLOCK.pattern})\s*\}}\s*\{{\s*({_TEXT_BLOCK.pattern})\s*\}}")
_DIGIT_GROUPS = re.compile(r"(?<![\w.,\\'])([1-9]\d{0,2}(?:( |'|_)\d{3})(?:\2\d{3})*)(?![\d'_]| *[/]| \d)")
_DOT_GROUPS = re.compile(r"(?<![\w.,])([1-9]\d{0,2}(?:(?:\.\d{3}){2,}(?:,\d+)?|\.\d{3},\d{1,2}))(?![\d.,])")
_COMMA_GROUPS = re.compile(r"(?<![\d.])(?<!\d,)([1-9]\d{0,2}(?:,\d{3})+|[1-9]\d?(?:,\d{2})+,\d{3})(?!\d)(?!,\d)")
_REWRITES = [
    (re.compile(r"\^ ?\{ ?\\circ ?\}"), r"^\\circ "),
    (re.compile(r"\{ +\}"), " "),
    (re.compile(r"([_^]) ?\{ ?(\w) ?\}(?! ?\w)"), r"\1\2"),
    (re.compile(r"\\(?:textcolor|color) ?\{\w*\}"), ""),
    (re.compile(r"\{([^{}]*)\\over(?![A-Za-z])([^{}]*)\}"), r"\\frac{\1}{\2}"),
    (re.compile(r"\{([^{}]*)\\choose(?![A-Za-z])([^{}]*)\}"), r"\\binom{\1}{\2}"),
    (re.compile(r"(?<=\d) *[xX] *(?=10 ?\^)"), r"\\cdot "),
    (re.compile(r"(?<![A-Za-z_\\\d.])(\d{1,400}(?:\.\d{0,400})?|\.\d{1,400})[eE]([+-]?\d{1,400})(?![\d.A-Za-z])"), r"\1\\cdot 10^{\2}"),
]


def normalize_notation(text: str) -> str:
    """Return the text with one spelling for each sign: LaTeX commands for glyphs, single spaces, `\\text{…}` around words."""
    text = _replace_glyphs(text.strip().strip("*`").strip())
    if "\\begin" not in text:
        text = re.sub(r"\\\\(?=[A-Za-z]{2})", r"\\", text)  # escaped twice on the way
    text = re.sub(r"(?<=\d) ?\{ ?, ?\} ?(?=\d{3}(?!\d))", "", text)  # `1{,}234`; `0{,}5` has a decimal comma
    text = re.sub(r"(?<=\d) ?\{ ?, ?\} ?(?=\d)", ".", text)
    text = re.sub(r"\\! *", "", text)
    text = _COMMAND.sub(_one_command, text)
    text = _UNIT_FRACTION.sub(r"\1/\3", text)
    for _ in range(2):  # blocks inside blocks
        text = _TEXT_BLOCK.sub(_text_block, text)
    text = text.replace("$", "" if text.count("$") % 2 == 0 else "\\USD ").replace("~", " ")
    for sign, command in (("**", "^"), ("<=", "\\le "), ("=<", "\\le "), (">=", "\\ge "), ("!=", "\\ne "), ("...", "\\dots ")):
        text = text.replace(sign, command)
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text)
    text = " ".join(text.split())
    text = _DIGIT_GROUPS.sub(lambda match: re.sub(r"[ '_]", "", match[1]), text)
    text = _DOT_GROUPS.sub(lambda match: match[1].replace(".", "").replace(",", "."), text)
    return text.strip(' *`"').rstrip(".,; ").lstrip("= ")


def join_comma_groups(text: str) -> str:
    """Remove commas between groups of digits, as in `1,234,567` and `12,34,567`."""
    return _COMMA_GROUPS.sub(lambda match: match[1].replace(",", ""), text)


def plain_words(text: str) -> str:
    """Return the text without `\\text{}` around words."""
    return " ".join(_TEXT_BLOCK.sub(r" \1 ", text).split())


def without_spaces(text: str) -> str:
    """Remove the spaces that do not separate two words or numbers."""
    return re.sub(r"(?<![A-Za-z0-9]) | (?![A-Za-z0-9])", "", text)


def _replace_glyphs(text: str) -> str:
    if text.isascii():
        return text
    text = re.sub("[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁼⁽⁾ⁿⁱ]+", lambda match: f"^{{{match[0].translate(_SCRIPTS['^'])}}}", text)
    text = re.sub("[₀-₉₊₋₌₍₎]+", lambda match: f"_{{{match[0].translate(_SCRIPTS['_'])}}}", text)
    return "".join(character if character.isascii() else _glyph(character) for character in text)


def _glyph(character: str) -> str:
    if character in _GLYPHS:
        return _GLYPHS[character]
    if character.isdecimal():  # digits of other scripts
        return str(unicodedata.decimal(character))
    plain = unicodedata.normalize("NFKC", character)
    if "⁄" in plain:  # one half, three quarters, …
        above, _, below = plain.partition("⁄")
        return f"\\frac{{{above}}}{{{below}}}"
    name = unicodedata.name(plain, "") if len(plain) == 1 else ""
    if name.startswith("GREEK ") and (greek := name.rpartition(" ")[2].lower().replace("lamda", "lambda")) in GREEK:
        return f"\\{greek.capitalize() if 'CAPITAL' in name else greek} "
    return "".join(_GLYPHS.get(each, each) for each in plain)


def _one_command(match: re.Match[str]) -> str:
    name = match[1] or match[2]
    name = _RENAMED.get(name, name)
    if name in _REPLACED:
        return _REPLACED[name]
    return f"\\{name} " if name.isalpha() else f"\\{name}"


def _text_block(match: re.Match[str]) -> str:
    """Unwrap a block without words, with digits, or of a function's name. Keep other words in their block."""
    content = " ".join(match[1].split())
    if content in FUNCTIONS:
        return f"\\{content} "
    if not re.search(r"[^\W\d_]{2}", re.sub(r"\\[A-Za-z]+", "", content)) or re.search(r"\d", content):
        return f" {content} "
    return ", ".join(f"\\text{{{part.strip()}}}" for part in content.split(","))
