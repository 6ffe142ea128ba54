"""The trainer: what runs inside a worker pod, from the agent to the optimizer step."""
