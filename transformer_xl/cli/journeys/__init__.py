"""The work of each command of `txl`, one module each."""
