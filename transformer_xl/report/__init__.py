"""A run's page: `record` and `figures` read its folder, `lead` and `curves` draw, and `page` writes one HTML file."""
