"""The decisions: pure functions of what was observed. No clock, randomness, environment or I/O."""
