"""docs/reference/fault_matrix.md has a row for each fault of the table, and each test that it names is there."""

from __future__ import annotations

import re

import pytest

from tests.e2e.faults import LADDER, NODES
from tests.e2e.matrix_page import ELSEWHERE, PAGE, page
from tests.e2e.recorder import Cost

ROOT = PAGE.parents[2]
FIGURES = re.compile(r"\| (\d+\.\d\d) \| (\d+\.\d\d) \| (\d+) \|$", re.MULTILINE)


def test_the_page_is_what_its_writer_makes_of_its_figures() -> None:
    """Nobody edits it by hand, and a new row is not forgotten."""
    text = PAGE.read_text()
    faults = (*LADDER, *NODES)
    figures = FIGURES.findall(text)
    assert len(figures) == len(faults)
    found = {
        fault.id: Cost(fault.id, float(detection), float(recovery), int(steps))
        for fault, (detection, recovery, steps) in zip(faults, figures, strict=True)
    }
    assert page(found) == text


@pytest.mark.parametrize("named", sorted({test for row in ELSEWHERE for test in row.tests}))
def test_the_named_test_exists(named: str) -> None:
    file, name = named.split("::")
    assert re.search(rf"^(?:async )?def {name}\(", (ROOT / file).read_text(), re.MULTILINE)
