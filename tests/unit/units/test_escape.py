"""Escaping by properties, against a second reading of the rules; the real systemd is asked in tests/hosts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddtree_ops.errors import UsageError
from ddtree_ops.units import escape

from .systemd_words import command_line, environment_file

SPECIAL = st.text(alphabet="\\\"'%$;#@-+!: \t{}`=xnu0é日🙂\x01\x7f", max_size=20)
# Unicode's 66 noncharacters: U+FDD0..FDEF and the last two of each plane.
NONCHARACTERS = [chr(c) for c in range(0x110000) if 0xFDD0 <= c <= 0xFDEF or c & 0xFFFE == 0xFFFE]
ANY = st.text(
    alphabet=st.characters(exclude_categories=["Cs"], exclude_characters=["\n", "\0", *NONCHARACTERS]), max_size=40
)


@given(st.lists(SPECIAL | ANY, max_size=6))
def test_arguments_come_back_as_they_were(arguments: list[str]) -> None:
    line = escape.exec_line(["/bin/x", *arguments])
    assert "\n" not in line
    assert command_line(line) == [["/bin/x", *arguments]]


@given(st.lists(SPECIAL | ANY, max_size=6))
def test_variables_come_back_as_they_were(values: list[str]) -> None:
    env = {f"V{index}": value for index, value in enumerate(values)}
    text = "".join(escape.environment_file_line(key, value) + "\n" for key, value in env.items())
    assert environment_file(text) == env


@given(SPECIAL | ANY)
def test_a_program_comes_back_or_is_refused(name: str) -> None:
    path = f"/opt/{name}"
    bad = any(ord(c) < 32 or c in "\x7f\"'\\$" for c in path)
    if bad:
        with pytest.raises(UsageError):
            escape.exec_program(path)
    else:
        assert command_line(escape.exec_program(path)) == [[path]]


@pytest.mark.parametrize("character", ["\n", "\0", "\ud800", "\udfff", *NONCHARACTERS[::9], NONCHARACTERS[-1]])
@pytest.mark.parametrize("where", ["{}", "a{}", "{}a", "a{}b"])
def test_what_systemd_does_not_carry_is_refused(character: str, where: str) -> None:
    value = where.format(character)
    for write in (
        escape.exec_word,
        escape.unit_text,
        lambda v: escape.exec_program("/x" + v),
        lambda v: escape.unit_path("/x" + v),
        lambda v: escape.environment_file_line("A", v),
    ):
        with pytest.raises(UsageError):
            write(value)


@pytest.mark.parametrize(
    "path", ["python", "", "./x", "-/bin/x", "@/bin/x", "+/bin/x", "!/bin/x", ":/bin/x", " /bin/x"]
)
def test_an_executable_that_is_not_an_absolute_path_is_refused(path: str) -> None:
    """Given a relative path or one behind a prefix that systemd would act on, refuse it."""
    with pytest.raises(UsageError, match="not an absolute path"):
        escape.exec_line([path, "x"])
    with pytest.raises(UsageError, match="not an absolute path"):
        escape.unit_path(path)


@pytest.mark.parametrize("key", ["", "1A", "A B", "A=B", "A-B", "É", "A\n"])
def test_a_variable_without_a_proper_name_is_refused(key: str) -> None:
    with pytest.raises(UsageError, match="not the name"):
        escape.environment_file_line(key, "x")


@pytest.mark.parametrize("value", [" a", "a ", "a\\", "a\tb", "a\x1bb"])
def test_a_unit_value_that_would_be_read_otherwise_is_refused(value: str) -> None:
    with pytest.raises(UsageError):
        escape.unit_text(value)


def test_specifiers_in_plain_values_are_escaped() -> None:
    assert escape.unit_path("/a %h/b") == "/a %%h/b"
