"""A run's page: `record` reads its folder, `figures` runs its model, and `page` writes one HTML file."""
