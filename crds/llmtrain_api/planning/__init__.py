"""What a job will need and how fast it will be, by formulas alone: memory, communication, time, and which layouts fit.

Estimates, not promises: the docs page `docs/tasks/plan.md` says how far they were from measurements.
"""
