"""From text to token batches, in an order that is a pure function of the seed and the samples consumed."""
