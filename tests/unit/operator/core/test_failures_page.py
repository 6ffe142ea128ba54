"""docs/concepts/failures.md shows the very ladder that decides."""

from __future__ import annotations

from llmtrain_api.constants import FailureClass
from llmtrain_api.generate import ROOT
from llmtrain_operator.core.ladder import LADDERS

PAGE = ROOT / "docs" / "concepts" / "failures.md"


def test_the_page_shows_every_rung_in_the_order_of_the_classes() -> None:
    rows = [f"| `{kind.value}` | {', '.join(action.value for action in LADDERS[kind])} |" for kind in FailureClass]
    assert "\n".join(["|---|---|", *rows, ""]) in PAGE.read_text()
