"""The llmtrain command."""
