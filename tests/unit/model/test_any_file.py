"""Whatever stands in a file, it is read or refused by UsageError with a printable message that names the file."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddtree_ops.data import data_dir
from ddtree_ops.errors import UsageError
from ddtree_ops.model import load_workspace
from ddtree_ops.model.yamlfile import read_yaml

PIECES = [
    *("address: ", "gpus:", "services:", "env: ", "budget: ", "\n", "\n  ", "- ", "{", "}", "[", "]", '"', "'"),
    *("&a ", "*a", "!!str ", "%YAML 1.2", "---", "...", "<<: ", "? ", ": ", "#", "\\", "\\ud800", "\\UFFFFFFFF"),
    *("\\x1b", "|", ">", "~", "8", "no", "٨", "é", "\t", "\x1b", "\r", "\u2028", "\ufeff", "0o7", "2024-01-01", "="),
    *(".inf", "-", "null", "@", "`"),
]
TEXTS = st.lists(st.sampled_from(PIECES), max_size=30).map("".join) | st.text(max_size=60)


def read_or_refuse(text: str) -> None:
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "x.yaml"
        file.write_bytes(text.encode("utf-8", "surrogatepass"))
        try:
            read_yaml(file, "x.yaml")
        except UsageError as error:
            assert error.message.startswith("x.yaml:")
            assert error.message.isprintable()


@settings(max_examples=400, deadline=None)
@given(TEXTS)
def test_any_text_is_read_or_refused(text: str) -> None:
    read_or_refuse(text)


@pytest.mark.parametrize(
    "text",
    [
        'a: "\\UFFFFFFFF"',
        'a: "\\U00110000"',
        'a: "\\ud800"',
        '"\\e[31m": 1',
        '"\\ud800": 1',
        "[" * 50_000,
        "{a: " * 20_000,
        "- " * 20_000,
        "? " * 20_000,
        "a: " + "9" * 100_000,
        "\ud800",
    ],
    ids=lambda text: ascii(text[:12]),
)
def test_hostile_text_is_refused(text: str) -> None:
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "x.yaml"
        file.write_bytes(text.encode("utf-8", "surrogatepass"))
        if text.startswith("a: 9"):
            assert isinstance(read_yaml(file, "x.yaml").value["a"].value, str)
            return
        with pytest.raises(UsageError) as caught:
            read_yaml(file, "x.yaml")
        assert caught.value.message.isprintable()


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_a_packaged_host_with_any_line_changed_is_read_or_refused(data: st.DataObject) -> None:
    """Given the packaged b300 with one line replaced or doubled, loading answers or refuses, and names a line."""
    lines = (data_dir("inventories") / "b300.yaml").read_text().splitlines()
    index = data.draw(st.integers(0, len(lines) - 1))
    key, colon, _ = lines[index].partition(":")
    lines[index] = data.draw(
        st.sampled_from([f"{key}{colon} {data.draw(TEXTS)}", "", f"{lines[index]}\n{lines[index]}"])
    )
    with tempfile.TemporaryDirectory() as directory:
        inventories = Path(directory) / "inventories"
        inventories.mkdir()
        (inventories / "b300.yaml").write_text("\n".join(lines), encoding="utf-8", errors="surrogatepass", newline="")
        try:
            load_workspace(Path(directory))
        except UsageError as error:
            assert error.message.startswith("inventories/b300.yaml:")
            assert error.message.isprintable()
