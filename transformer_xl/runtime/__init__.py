"""What the machine gives: devices, ranks, files, the terminal."""
