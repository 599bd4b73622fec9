"""Scheduler: queues, token budget, planner, and the outputs of requests. Pure Python."""
