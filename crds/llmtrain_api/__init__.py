"""The contract of llmtrain: what users write, what the operator reports, and how operator and workers talk.

Imports neither the operator nor the trainer, nor torch, kopf or kubernetes: both sides stand on it.
"""

__version__ = "0.1.0"
