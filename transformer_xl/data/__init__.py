"""From text to segments: `vocab`, `corpus` (token stores), `datasets` (published and any other text), `loader`."""
