"""`python -m llmtrain_trainer [FILE]`: one rank by hand, from a RankLaunch document (FILE, or LLMTRAIN_LAUNCH)."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from llmtrain_api.launch import RankLaunch
from llmtrain_trainer.rank import run

LAUNCH = "LLMTRAIN_LAUNCH"
TORCHRUN = {"global_rank": "RANK", "local_rank": "LOCAL_RANK", "node_rank": "GROUP_RANK", "world_size": "WORLD_SIZE"}
"""What torchrun sets per process, and the field that it overrides, so that one document serves all ranks."""


def main() -> int:
    text = Path(sys.argv[1]).read_text(encoding="utf-8") if len(sys.argv) > 1 else os.environ.get(LAUNCH)
    if not text:
        print(f"usage: python -m llmtrain_trainer FILE, or set {LAUNCH} to a RankLaunch document", file=sys.stderr)
        return 2
    launch = RankLaunch.model_validate_json(text)
    own = {field: int(os.environ[name]) for field, name in TORCHRUN.items() if name in os.environ}
    return run(launch.model_copy(update=own))


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)
