"""The work of each command of `txl`, one page each."""
