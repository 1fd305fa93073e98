"""Races against other libraries: each contender has a process of its own, and results are compared before times.

`python -m benchmarks PART`; `docs/bench.md` describes the parts. Processes in other environments import this package
too, so this file imports nothing.
"""
