"""A rank entry that takes as long to import as torch does."""

import time

from tests.integration.agent.rank_program import run

time.sleep(1.5)

__all__ = ["run"]
