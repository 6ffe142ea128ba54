"""The operator: turns an LLMTrainJob into worker pods (or local processes) and keeps it training."""
