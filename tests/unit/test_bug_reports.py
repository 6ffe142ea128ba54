"""docs/reference/bug_reports.md: every test that it names is there, and every report has an answer."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "reference" / "bug_reports.md").read_text()
NAMED = sorted(set(re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", PAGE)))
ROWS = re.findall(r"^\| ([\d, -]+) \| (.+?) \| (.+?) \| (.+?) \|$", PAGE, re.MULTILINE)
LEFT_OUT = {32}


@pytest.mark.parametrize(("file", "name"), NAMED, ids=[name for _, name in NAMED])
def test_the_named_test_exists(file: str, name: str) -> None:
    text = (ROOT / file).read_text()
    assert re.search(rf"^(?:async )?def {name}\(", text, re.MULTILINE)


def test_every_report_has_an_answer() -> None:
    answered: set[int] = set()
    for numbers, *_ in ROWS:
        for part in numbers.split(","):
            first, _, last = part.strip().partition("-")
            answered |= set(range(int(first), int(last or first) + 1))
    assert answered == set(range(1, 68)) - LEFT_OUT


def test_an_answer_is_a_test_a_reason_or_not_yet() -> None:
    words = ("`tests/", "not yet", "not ours", "there is", "there are", "see ", "same tests", "not used")
    assert [row for row in ROWS if not any(word in row[3] for word in words)] == []
