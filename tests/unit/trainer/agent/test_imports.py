"""What the agent's own process may load: it must start fast and stay small beside the ranks."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import sys, llmtrain_trainer.agent.main as main
early = set(sys.modules)
import llmtrain_trainer.agent.agent, llmtrain_trainer.agent.host
print([name for name in ("torch", "numpy") if name in sys.modules], [n for n in ("aiohttp", "pydantic") if n in early])
"""


def test_agent_imports_no_torch_and_spawns_its_forkserver_before_the_slow_imports() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.split("\n")[0] == "[] []"
