"""The imperative shell: work queue, reconcile loop, metrics, health, and the process that holds them."""
