"""A thread for each worker: models here are tiny, and the threads of several workers would wait for each other."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
