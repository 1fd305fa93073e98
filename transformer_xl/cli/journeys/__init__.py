"""The journeys behind `txl`, one a page: `train`, `evaluate` (and score), `generate`, `data`, `env`, `demo`."""
