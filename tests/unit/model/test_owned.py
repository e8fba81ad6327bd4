"""What argparse would take for an owned flag is refused, in every spelling."""

from __future__ import annotations

import argparse
import contextlib
import io

import pytest

from ddtree_ops.engine.arguments import parse_arguments
from ddtree_ops.model.owned import _OWNED, owner


def argparse_takes(argument: str) -> bool:
    """True when a parser of all owned flags reads one of them in ``argument``, abbreviations allowed."""
    parser = argparse.ArgumentParser(add_help=False)
    for flag in _OWNED:
        parser.add_argument(flag, nargs="?")
    with contextlib.redirect_stderr(io.StringIO()):
        try:
            values, _ = parser.parse_known_args([argument])
        except SystemExit:
            return False
    return any(value is not None for value in vars(values).values())


@pytest.mark.parametrize("flag", _OWNED)
def test_every_beginning_that_argparse_takes_is_owned(flag: str) -> None:
    taken = [flag[:length] for length in range(3, len(flag) + 1) if argparse_takes(f"{flag[:length]}=1")]
    assert flag in taken
    for beginning in taken:
        assert owner(beginning) == owner(f"{beginning}=1") == _OWNED[flag]


def test_the_flags_that_a_launch_gives_the_reference_engine_are_owned() -> None:
    """Given the engine's own help, each flag that belongs to the profile is refused, the others are free."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), pytest.raises(SystemExit):
        parse_arguments(["--help"])
    flags = {word.strip("[],") for word in out.getvalue().split() if word.strip("[],").startswith("--")}
    free = {flag for flag in flags if owner(flag) is None}
    assert free == {
        *("--help", "--tokenizer-path", "--served-model-name", "--max-total-tokens", "--skip-tokenizer-init"),
        *("--fault", "--num-threads", "--log-level", "--page-size", "--disable-radix-cache", "--speculative-sampling"),
    }


@pytest.mark.parametrize("value", ["8", "budget", "-v", "", "x--port", "--portly", "--tpu", "--host-cache"])
def test_values_and_other_flags_are_free(value: str) -> None:
    assert owner(value) is None
