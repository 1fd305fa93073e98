"""A run's page: what its folder says (`record`), drawn (`curves`) and set (`page`) as one HTML file without scripts."""
