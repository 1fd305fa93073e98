"""A run's page: `record` reads its folder, `curves` draws, and `page` writes one HTML file without scripts."""
