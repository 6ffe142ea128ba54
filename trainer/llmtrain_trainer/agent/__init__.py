"""PID 1 of a worker: starts, watches and ends the ranks as the coordinator orders. It never imports torch.

main -> Agent (agent.py) -> Supervisor (decides) -> RankHost (talks to the fork-server) -> forkserver -> rank
                         -> SyncClient (long-poll to the coordinator)
"""
