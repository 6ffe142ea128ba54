"""Weights and config.json as Hugging Face transformers writes them: families.py says what is called how, both ways."""
