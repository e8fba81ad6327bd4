"""The ancestor mask, its flat buffer with the historic fault, and the walk."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from ddtree_ops.engine.mask import ancestors, new_buffer, read_rows, write_rows
from ddtree_ops.engine.walk import accepted_path


@st.composite
def trees(draw: st.DrawFn) -> list[int]:
    """Parents of a random tree, node 0 the root."""
    return [0] + [draw(st.integers(0, node - 1)) for node in range(1, draw(st.integers(1, 14)))]


def depths(parent: list[int]) -> list[int]:
    found = [0]
    for node in range(1, len(parent)):
        found.append(found[parent[node]] + 1)
    return found


def by_definition(parent: list[int]) -> NDArray[np.bool_]:
    width = len(parent)
    cells = np.zeros((width, width), dtype=bool)
    for node in range(width):
        current = node
        cells[node, current] = True
        while current != 0:
            current = parent[current]
            cells[node, current] = True
    return cells


@given(trees(), st.integers(0, 4))
def test_given_any_tree_a_node_sees_itself_and_its_ancestors_only(parent: list[int], spare: int) -> None:
    found = ancestors(np.array([parent, [0] * len(parent)]), max(depths(parent)) + spare)
    assert (found[0] == by_definition(parent)).all()
    assert (found[1] == by_definition([0] * len(parent))).all()


@given(trees(), st.integers(1, 3))
def test_given_rows_w_apart_the_buffer_gives_back_what_was_written(parent: list[int], batch: int) -> None:
    width = len(parent)
    cells = np.stack([by_definition(parent)] * batch)
    buffer = new_buffer(batch, width, width)
    write_rows(buffer, cells, width)
    assert buffer.shape == (batch * width * width,)
    assert (read_rows(buffer, batch, width) == cells).all()


@pytest.mark.parametrize("width, stride", [(9, 8), (17, 8), (4, 8), (3, 8)])
def test_given_rows_a_block_apart_the_reader_sees_another_tree(width: int, stride: int) -> None:
    cells = np.stack([by_definition([0] * width)] * 2)
    buffer = new_buffer(2, width, stride)
    write_rows(buffer, cells, stride)
    read = read_rows(buffer, 2, width)
    assert not (read == cells).all()
    # Cell by cell what the two strides say: row i starts at i * stride, later rows overwrite earlier ones.
    expected = np.zeros(2 * width * width + width * stride, dtype=bool)
    for request in range(2):
        for row in range(width):
            for column in range(width):
                expected[request * width * width + row * stride + column] = cells[request, row, column]
    assert (read.reshape(-1) == expected[: 2 * width * width]).all()


def test_the_walk_follows_the_targets_choice_and_stops_where_nothing_was_drafted() -> None:
    #        root -> 1 (7) -> 3 (9) -> 4 (2);  root -> 2 (8)
    parent, token = [0, 0, 0, 1, 3], [5, 7, 8, 9, 2]
    assert accepted_path(parent, token, [7, 9, 0, 2, 6]) == [0, 1, 3, 4]
    assert accepted_path(parent, token, [8, 9, 1, 2, 6]) == [0, 2]
    assert accepted_path(parent, token, [1, 9, 0, 2, 6]) == [0]
    assert accepted_path([0], [5], [5]) == [0]


def test_the_walk_does_not_take_the_root_for_its_own_child() -> None:
    assert accepted_path([0, 0], [5, 6], [5, 5]) == [0]
