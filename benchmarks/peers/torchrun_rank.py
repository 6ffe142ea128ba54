"""One rank of our trainer under torchrun in place of our operator and agent: the same training, another nanny.

Started by `python -m torch.distributed.run`; reads its variables and the job's spec from the file named by SPEC_FILE.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from llmtrain_api.launch import RankLaunch
from llmtrain_trainer.rank import run


def launch_from_torchrun() -> RankLaunch:
    env = os.environ
    return RankLaunch(
        run_id="bench/torchrun",
        # torchrun's restart counter differs between agents; the port of a round is new and the same for all its ranks.
        attempt=int(env["MASTER_PORT"]),
        global_rank=int(env["RANK"]),
        local_rank=int(env["LOCAL_RANK"]),
        node_rank=int(env["GROUP_RANK"]),
        world_size=int(env["WORLD_SIZE"]),
        local_world_size=int(env["LOCAL_WORLD_SIZE"]),
        master_address=env["MASTER_ADDR"],
        master_port=int(env["MASTER_PORT"]),
        spec=json.loads(Path(env["SPEC_FILE"]).read_text()),
        error_file=f"/tmp/error-{env['RANK']}.json",
    )


if __name__ == "__main__":
    launch = launch_from_torchrun()
    Path("/proc/self/comm").write_text(f"ltrank-{launch.global_rank}")
    code = run(launch)
    sys.stdout.flush()
    os._exit(code)
