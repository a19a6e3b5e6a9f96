"""One notation for answers: the ways to write the same sign, space, number or word become one.

`normalize_notation` does not judge what a text means. It works in time linear in the text's length.
"""

from __future__ import annotations

import re
import unicodedata

_FUNCTION_NAMES = (
    "sin cos tan cot sec csc arcsin arccos arctan arccot sinh cosh tanh coth arcsinh arccosh arctanh log ln lg exp sqrt max min gcd lcm"
)
_GREEK_NAMES = "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi omicron pi rho sigma tau upsilon phi chi psi omega"
_DROPPED = (
    "left right big Big bigg Bigg bigl bigr Bigl Bigr biggl biggr Biggl Biggr displaystyle textstyle limits nolimits middle boxed fbox "
    "bf rm it negthinspace phantom strut centering bold boldsymbol bm mathit mathsf mathtt mathnormal ensuremath underline emph "
    "therefore quad qquad enspace thinspace medspace thickspace space nobreakspace newline"
)
_TEXT = "text textbf textit textrm textsf texttt textup textnormal mbox hbox mathrm mathbf operatorname"
FUNCTIONS = set(_FUNCTION_NAMES.split())
_GREEK = _GREEK_NAMES.split()
GREEK = {*_GREEK, *(name.capitalize() for name in _GREEK), "varepsilon", "varphi", "vartheta", "varrho", "ell", "hbar"}

_SCRIPTS = {"^": str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁼⁽⁾ⁿⁱ", "0123456789+-=()ni"), "_": str.maketrans("₀₁₂₃₄₅₆₇₈₉₊₋₌₍₎", "0123456789+-=()")}
_GLYPHS = {
    **dict.fromkeys("−–‒—", "-"), **dict.fromkeys("×·⋅∙", "\\cdot "), **dict.fromkeys("÷⁄∕", "/"), **dict.fromkeys("°º", "^\\circ "),
    **dict.fromkeys("≤⩽", "\\le "), **dict.fromkeys("≥⩾", "\\ge "), **dict.fromkeys("∅⌀", "\\emptyset "), **dict.fromkeys("′’‘", "'"),
    "٫": ".", "٬": ",", "∞": "\\infty ", "≠": "\\ne ", "≈": "\\approx ", "±": "\\pm ", "∓": "\\mp ", "∪": "\\cup ", "∩": "\\cap ",
    "∈": "\\in ", "∖": "\\setminus ", "∨": "\\lor ", "∧": "\\land ", "∣": "|", "∫": "\\int ", "∑": "\\sum ", "∏": "\\prod ", "µ": "\\mu ",
    "⟨": "\\langle ", "⟩": "\\rangle ", "⌊": "\\lfloor ", "⌋": "\\rfloor ", "⌈": "\\lceil ", "⌉": "\\rceil ", "…": "\\dots ",
    **{glyph: f"\\mathbb{{{letter}}}" for glyph, letter in zip("ℝℂℤℕℚ", "RCZNQ", strict=True)},
}  # fmt: skip
_RENAMED = {
    **dict.fromkeys(("dfrac", "tfrac", "cfrac"), "frac"), **dict.fromkeys(("dbinom", "tbinom"), "binom"), "leq": "le", "leqslant": "le",
    "geq": "ge", "geqslant": "ge", "neq": "ne", "varnothing": "emptyset", "empty": "emptyset", "times": "cdot", "ast": "cdot",
    **dict.fromkeys(("ldots", "cdots", "dotsc", "dotsb", "dotsm"), "dots"), "infin": "infty", "vee": "lor", "wedge": "land",
    "backslash": "setminus", "textdegree": "degree", "mid": "vert", "tg": "tan", "ctg": "cot", "arctg": "arctan", "lbrace": "{",
    "rbrace": "}", "isin": "in", "cross": "cdot",
}  # fmt: skip
_REPLACED = {
    "div": "/", "slash": "/", "lt": "<", "gt": ">", "colon": ":", "vert": "|", "lvert": "|", "rvert": "|", "lbrack": "[", "rbrack": "]",
    "lparen": "(", "rparen": ")", "degree": "^\\circ ", "prime": "'", "%": "%", "&": "&", "#": "#", "i": "i", "imath": "i",
    "$": "\\USD ", "dollar": "\\USD ", "mathdollar": "\\USD ", "textdollar": "\\USD ", "pounds": "£", "euro": "€", "ang": "", "/": "",
    **dict.fromkeys([*",;: >", *_DROPPED.split()], " "), **dict.fromkeys("!()[]", ""), **dict.fromkeys(_TEXT.split(), "\\text"),
}  # fmt: skip
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
    text = re.sub("√ ?([0-9]+(?:[.][0-9]+)?|[A-Za-z])", r"\\sqrt{\1}", text).replace("√", "\\sqrt ")
    text = re.sub("∛ ?([0-9]+|[A-Za-z])", r"\\sqrt[3]{\1}", text)
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
