"""Timings: each contender in a process of its own, its result held against the others' before its time counts."""
