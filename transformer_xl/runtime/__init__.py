"""The machine: devices, ranks, files, the terminal."""
