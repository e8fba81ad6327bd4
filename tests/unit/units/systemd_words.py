"""A second reading of systemd's quoting, written from systemd.syntax(7) and systemd.service(5) for the tests alone."""

from __future__ import annotations

_ESCAPES = {
    "a": "\a",
    "b": "\b",
    "f": "\f",
    "n": "\n",
    "r": "\r",
    "t": "\t",
    "v": "\v",
    "\\": "\\",
    '"': '"',
    "'": "'",
    "s": " ",
}
_LENGTHS = {"x": 2, "u": 4, "U": 8}


def command_line(line: str) -> list[list[str]]:
    """The commands of an Exec line as lists of arguments after quotes, escapes, specifiers and variables.

    Raises ValueError for a specifier or variable that is left to expand, and for an unknown escape.
    """
    commands: list[list[str]] = [[]]
    for word, quoted in _words(line):
        if word == ";" and not quoted:
            commands.append([])
        else:
            commands[-1].append(_variables(_specifiers(word)))
    return commands


def _words(line: str) -> list[tuple[str, bool]]:
    words: list[tuple[str, bool]] = []
    rest = list(line)
    while rest:
        if rest[0] in " \t":
            rest.pop(0)
            continue
        word, quote, quoted = "", "", False
        while rest and (quote or rest[0] not in " \t"):
            character = rest.pop(0)
            if character == "\\":
                word += _escape(rest)
            elif quote and character == quote:
                quote = ""
            elif not quote and character in "\"'":
                quote, quoted = character, True
            else:
                word += character
        if quote:
            raise ValueError("a quote is left open")
        words.append((word, quoted))
    return words


def _escape(rest: list[str]) -> str:
    letter = rest.pop(0)
    if letter in _LENGTHS:
        digits = "".join(rest.pop(0) for _ in range(_LENGTHS[letter]))
        return chr(int(digits, 16))
    return _ESCAPES[letter]


def _specifiers(word: str) -> str:
    parts = word.split("%%")
    if any("%" in part for part in parts):
        raise ValueError("a specifier is left")
    return "%".join(parts)


def _variables(word: str) -> str:
    parts = word.split("$$")
    if any("$" in part for part in parts):
        raise ValueError("a variable is left")
    return "$".join(parts)


def environment_file(text: str) -> dict[str, str]:
    """An EnvironmentFile's variables (systemd.exec(5)): double quotes, backslash before ``"\\$``` and itself."""
    found: dict[str, str] = {}
    at = 0
    while at < len(text):
        if text[at] in "#;":
            at = text.index("\n", at) + 1
            continue
        if text[at] == "\n":
            at += 1
            continue
        key, _, _ = text[at:].partition("=")
        at += len(key) + 1
        if text[at] != '"':
            raise ValueError("not quoted")
        at += 1
        value = ""
        while text[at] != '"':
            if text[at] == "\\" and text[at + 1] in '"\\$`':
                at += 1
            value += text[at]
            at += 1
        at += 1
        if text[at] != "\n":
            raise ValueError("text after the value")
        found[key] = value
    return found
