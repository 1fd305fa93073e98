"""Races against other libraries. Each contender has its own process, and results are compared before times.

`python -m benchmarks PART`; `docs/results.md` describes the parts. Processes in other environments import this package
too, so this file imports nothing.
"""
