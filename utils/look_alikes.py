"""Characters that look like those of a keyboard, as text from a web page or an editor has them."""

_HYPHENS = "\u2010\u2011\u2012\u2013\u2014\u2015\u2212\ufe58\ufe63\uff0d"
_DOUBLE_QUOTES, _SINGLE_QUOTES = "\u201c\u201d\u201e\u201f\u00ab\u00bb\uff02", "\u2018\u2019\u201a\u201b\u2032\uff07"
_BLANKS, _NOTHING = "\u00a0\u2007\u2009\u200a\u202f\u3000", "\u200b\u200c\u200d\u2060\ufeff"
_PLAIN = str.maketrans(
    dict.fromkeys(_HYPHENS, "-")
    | dict.fromkeys(_DOUBLE_QUOTES, '"')
    | dict.fromkeys(_SINGLE_QUOTES, "'")
    | dict.fromkeys(_BLANKS, " ")
    | dict.fromkeys(_NOTHING, "")
    | {"\uff1d": "=", "\uff0c": ",", "\uff1a": ":"}
)


def plain_text(text: str) -> str:
    """Return the text with the keyboard's characters in place of those that look like them."""
    return text.translate(_PLAIN)


def look_alikes(text: str) -> str:
    """Return the characters of the text that are not what they look like, for a message."""
    found = dict.fromkeys(character for character in text if plain_text(character) != character)
    return ", ".join(f"{each if each.isprintable() else ''} U+{ord(each):04X}".strip() for each in found)
