"""Values into the syntaxes that systemd reads. All escaping of the project lives here.

Sources: systemd.syntax(7) "Quoting", systemd.service(5) "Command lines", systemd.exec(5) "EnvironmentFile=". What is
refused is what systemd 252 was seen not to carry unchanged (tests/hosts/test_escaping.py).
"""

from __future__ import annotations

import re

from ddtree_ops.errors import UsageError

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# systemd reads a unit as UTF-8 of its own taste: it drops lines with surrogates or Unicode's noncharacters.
_UNREADABLE = re.compile(
    "[\ud800-\udfff\ufdd0-\ufdef" + "".join(f"{chr(p << 16 | 0xFFFE)}{chr(p << 16 | 0xFFFF)}" for p in range(17)) + "]"
)
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_IN_EXEC = str.maketrans(
    {
        **{chr(code): f"\\x{code:02x}" for code in (*range(0x20), 0x7F)},
        "\\": "\\\\",
        '"': '\\"',
        "%": "%%",
        "$": "$$",
    }
)
_IN_FILE = str.maketrans({character: f"\\{character}" for character in '\\"$`'})


def exec_word(value: str) -> str:
    """One argument of an Exec line that reaches the process byte for byte, tabs and other control characters included.

    Raises UsageError for newline, NUL, and code points that systemd takes for invalid UTF-8.
    """
    _refuse_lines(value, "an argument")
    return f'"{value.translate(_IN_EXEC)}"'


def exec_program(path: str) -> str:
    """The first word of an Exec line: an absolute path.

    Raises UsageError for a relative one, which systemd would look up in its own search path, and for characters that
    systemd refuses there (control characters, quotes, backslash) or expands in argv[0] but not in the path (``$``).
    """
    if not path.startswith("/"):
        raise UsageError(f"executable {path!r} is not an absolute path")
    found = re.search(r"[\x00-\x1f\x7f\"'\\$]", path)
    if found:
        raise UsageError(f"executable {path!r} has {found[0]!r}, which systemd does not take in an executable's path")
    return exec_word(path)


def exec_line(argv: list[str]) -> str:
    """The value of ExecStart= for a command; ``argv[0]`` is the executable."""
    return " ".join([exec_program(argv[0]), *map(exec_word, argv[1:])])


def unit_path(path: str) -> str:
    """An absolute path as the whole value of a directive such as EnvironmentFile= (specifiers are escaped)."""
    if not path.startswith("/"):
        raise UsageError(f"{path!r} is not an absolute path")
    return unit_text(path)


def unit_text(value: str) -> str:
    """Text as the whole value of a directive such as Description=.

    Raises UsageError for what such a value cannot hold: control characters, space at its ends, a backslash at its end
    (it would swallow the next line).
    """
    _refuse_lines(value, "a unit's value")
    if _CONTROL.search(value) or value != value.strip() or value.endswith("\\"):
        raise UsageError(f"{value!r} cannot be a unit's value: control characters, outer space or a final backslash")
    return value.replace("%", "%%")


def environment_file_line(key: str, value: str) -> str:
    """``KEY="value"`` for an EnvironmentFile, without newline. Nothing is expanded there; four characters are escaped.

    Raises UsageError for a key that is no variable's name, and for values as in ``exec_word``.
    """
    if not _VARIABLE.fullmatch(key):
        raise UsageError(f"{key!r} is not the name of an environment variable")
    _refuse_lines(value, f"the variable {key}")
    return f'{key}="{value.translate(_IN_FILE)}"'


def _refuse_lines(value: str, what: str) -> None:
    if value.isascii() and value.isprintable():
        return
    for character, name in (("\n", "a newline"), ("\0", "a NUL")):
        if character in value:
            raise UsageError(f"{what} has {name}: {value[:60]!r}")
    found = _UNREADABLE.search(value)
    if found:
        raise UsageError(f"{what} has U+{ord(found[0]):04X}, which systemd does not read: {value[:60]!r}")
