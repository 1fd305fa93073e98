"""Convert text to segments: `vocab`, `corpus` (token stores), `datasets` (names of texts), `loader`."""
