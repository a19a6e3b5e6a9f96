"""One notation for answers: the ways to write the same sign, space, number or word become one.

`normalize_notation` does not judge what a text means. It works in time linear in the text's length.
"""

from __future__ import annotations

import re
import unicodedata

_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁼⁽⁾ⁿⁱ", "0123456789+-=()ni")
_SUBSCRIPTS = str.maketrans("₀₁₂₃₄₅₆₇₈₉₊₋₌₍₎", "0123456789+-=()")
_GLYPHS = {
    "−": "-", "–": "-", "‒": "-", "—": "-", "×": "\\cdot ", "·": "\\cdot ", "⋅": "\\cdot ", "∙": "\\cdot ", "÷": "/", "⁄": "/",
    "∞": "\\infty ", "≤": "\\le ", "≥": "\\ge ", "⩽": "\\le ", "⩾": "\\ge ", "≠": "\\ne ", "≈": "\\approx ", "±": "\\pm ", "∓": "\\mp ",
    "°": "^\\circ ", "º": "^\\circ ", "∅": "\\emptyset ", "⌀": "\\emptyset ", "∪": "\\cup ", "∩": "\\cap ", "∈": "\\in ", "∖": "\\setminus ", "∕": "/",
    "ℝ": "\\mathbb{R}", "ℂ": "\\mathbb{C}", "ℤ": "\\mathbb{Z}", "ℕ": "\\mathbb{N}", "ℚ": "\\mathbb{Q}", "⟨": "\\langle ", "⟩": "\\rangle ",
    "⌊": "\\lfloor ", "⌋": "\\rfloor ", "⌈": "\\lceil ", "⌉": "\\rceil ", "∨": "\\lor ", "∧": "\\land ", "∣": "|", "′": "'", "’": "'",
    "‘": "'", "∫": "\\int ", "∑": "\\sum ", "∏": "\\prod ", "µ": "\\mu ", "⇒": "\\Rightarrow ", "→": "\\to ",
}  # fmt: skip
_GREEK = [
    "alpha",
    "beta",
    "gamma",
    "delta",
    "epsilon",
    "zeta",
    "eta",
    "theta",
    "iota",
    "kappa",
    "lambda",
    "mu",
    "nu",
    "xi",
    "omicron",
    "pi",
    "rho",
    "sigma",
    "tau",
    "upsilon",
    "phi",
    "chi",
    "psi",
    "omega",
]
GREEK = {*_GREEK, *(name.capitalize() for name in _GREEK), "varepsilon", "varphi", "vartheta", "varrho", "ell", "hbar"}

_RENAMED = {
    "dfrac": "frac", "tfrac": "frac", "cfrac": "frac", "dbinom": "binom", "tbinom": "binom", "leq": "le", "leqslant": "le", "geq": "ge",
    "geqslant": "ge", "neq": "ne", "varnothing": "emptyset", "empty": "emptyset", "ldots": "dots", "cdots": "dots", "dotsc": "dots",
    "dotsb": "dots", "times": "cdot", "ast": "cdot", "infin": "infty", "vee": "lor", "wedge": "land", "backslash": "setminus",
    "operatorname*": "operatorname", "mod": "bmod", "textdegree": "degree", "mid": "vert", "tg": "tan", "ctg": "cot", "arctg": "arctan",
    "lbrace": "{", "rbrace": "}", "neg": "lnot", "isin": "in", "dotsm": "dots", "cross": "cdot", "imath": "i",
}  # fmt: skip
_REPLACED = {
    "div": "/", "lt": "<", "gt": ">", "colon": ":", "vert": "|", "lvert": "|", "rvert": "|", "lbrack": "[", "rbrack": "]", "lparen": "(",
    "rparen": ")", "degree": "^\\circ ", "prime": "'", "%": "%", "&": "&", "#": "#", "i": "i", "$": "\\USD ", "pounds": "£", "euro": "€",
    "dollar": "\\USD ", "text": "\\text", "slash": "/", "over": "\\over ", "ang": "", "/": "", "lnot": "\\lnot ",
}  # fmt: skip
_SPACES = {",", ";", ":", " ", ">", "quad", "qquad", "enspace", "thinspace", "medspace", "thickspace", "space", "nobreakspace", "newline"}
_DROPPED = {
    "!", "left", "right", "big", "Big", "bigg", "Bigg", "bigl", "bigr", "Bigl", "Bigr", "biggl", "biggr", "Biggl", "Biggr", "displaystyle",
    "textstyle", "limits", "nolimits", "middle", "boxed", "fbox", "bf", "rm", "it", "negthinspace", "(", ")", "[", "]", "phantom", "strut",
    "centering", "bold", "boldsymbol", "bm", "mathit", "mathsf", "mathtt", "mathnormal", "ensuremath", "underline", "emph", "mathstrut",
}  # fmt: skip
_TEXT = {
    "text",
    "textbf",
    "textit",
    "textrm",
    "textsf",
    "texttt",
    "textup",
    "textnormal",
    "mbox",
    "hbox",
    "mathrm",
    "mathbf",
    "operatorname",
}
_COMMAND = re.compile(r"\\(?:([A-Za-z]+)(?:\s*\*(?=\s*\{))?|(.))", re.DOTALL)
_TEXT_BLOCK = re.compile(r"\\text\s*\{([^{}]*)\}")
_ONE_GROUP = r"[1-9]\d{0,2}"
_DIGIT_GROUPS = re.compile(rf"(?<![\w.,\\'])({_ONE_GROUP}(?:( |'|_)\d{{3}})(?:\2\d{{3}})*)(?![\d'_]| *[/]| \d)")
_DOT_GROUPS = re.compile(rf"(?<![\w.,])({_ONE_GROUP}(?:\.\d{{3}}){{2,}})(?:,(\d+))?(?![\d.,])")
_DOT_GROUP_AND_COMMA = re.compile(rf"(?<![\w.,])({_ONE_GROUP}\.\d{{3}}),(\d{{1,2}})(?![\d.,])")
_COMMA_GROUPS = re.compile(r"(?<![\d.])(?<!\d,)([1-9]\d{0,2}(?:,\d{3})+|[1-9]\d?(?:,\d{2})+,\d{3})(?!\d)(?!,\d)")


def normalize_notation(text: str) -> str:
    """Return the text with one spelling for each sign: LaTeX commands for glyphs, single spaces, `\\text{…}` around words."""
    text = _replace_glyphs(text.strip().strip("*`").strip())
    if "\\begin" not in text:
        text = re.sub(r"\\\\(?=[A-Za-z]{2})", r"\\", text)  # escaped twice on the way
    text = re.sub(r"(?<=\d) ?\{ ?, ?\} ?(?=\d{3}(?!\d))", "", text)  # `1{,}234`; `0{,}5` has a decimal comma
    text = re.sub(r"(?<=\d) ?\{ ?, ?\} ?(?=\d)", ".", text)
    text = re.sub(r"\\! *", "", text)
    text = _COMMAND.sub(_one_command, text)
    for _ in range(2):  # blocks inside blocks
        text = _TEXT_BLOCK.sub(_text_block, text)
    text = text.replace("$", "" if text.count("$") % 2 == 0 else "\\USD ").replace("~", " ")
    text = text.replace("**", "^").replace("<=", "\\le ").replace(">=", "\\ge ").replace("!=", "\\ne ")
    text = text.replace("...", "\\dots ").replace("…", "\\dots ")
    text = re.sub(r"\^ ?\{ ?\\circ ?\}", "^\\\\circ ", text)
    text = re.sub(r"(?<=\d) *[xX] *(?=10 ?\^)", "\\\\cdot ", text)
    text = re.sub(r"(?<![A-Za-z_\\\d.])(\d+(?:\.\d*)?|\.\d+)[eE]([+-]?\d+)(?![\d.A-Za-z])", r"\1\\cdot 10^{\2}", text)
    text = " ".join(text.split())
    text = _DIGIT_GROUPS.sub(lambda match: re.sub(r"[ '_]", "", match[1]), text)
    text = _DOT_GROUPS.sub(lambda match: match[1].replace(".", "") + (f".{match[2]}" if match[2] else ""), text)
    text = _DOT_GROUP_AND_COMMA.sub(lambda match: f"{match[1].replace('.', '')}.{match[2]}", text)
    return text.strip(' *`"').rstrip(".,; ")


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
    text = re.sub("[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁼⁽⁾ⁿⁱ]+", lambda match: f"^{{{match[0].translate(_SUPERSCRIPTS)}}}", text)
    text = re.sub("[₀-₉₊₋₌₍₎]+", lambda match: f"_{{{match[0].translate(_SUBSCRIPTS)}}}", text)
    text = re.sub("√ ?([0-9]+(?:[.][0-9]+)?|[A-Za-z])", r"\\sqrt{\1}", text).replace("√", "\\sqrt ")
    text = re.sub("∛ ?([0-9]+|[A-Za-z])", r"\\sqrt[3]{\1}", text)
    return "".join(character if character.isascii() else _glyph(character) for character in text)


def _glyph(character: str) -> str:
    if character in _GLYPHS:
        return _GLYPHS[character]
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
    if name in _SPACES:
        return " "
    if name in _DROPPED:
        return " " if match[1] else ""
    if name in _TEXT:
        return "\\text"
    if name in _REPLACED:
        return _REPLACED[name]
    return f"\\{name} " if name.isalpha() else f"\\{name}"


def _text_block(match: re.Match[str]) -> str:
    """Unwrap a block without words, with digits, or of a function's name. Keep other words in their block."""
    content = " ".join(match[1].split())
    if content in FUNCTIONS:
        return f"\\{content} "
    if not re.search(r"[^\W\d_]{2}", content) or re.search(r"\d", content):
        return f" {content} "
    return f"\\text{{{content}}}"


FUNCTIONS = {
    "sin", "cos", "tan", "cot", "sec", "csc", "arcsin", "arccos", "arctan", "arccot", "sinh", "cosh", "tanh", "coth", "arcsinh", "arccosh",
    "arctanh", "log", "ln", "lg", "exp", "sqrt", "max", "min", "gcd", "lcm",
}  # fmt: skip
