"""Random numbers of the user's code that are the same in every run of a job.

`random`, `numpy.random` and torch are seeded before each batch from the job's fingerprint and the place of the batch.
So runs with any number of workers, retries and resumed runs agree. What a function seeds itself stays as it is. Not
covered: generators that take their seed from the system (`numpy.random.default_rng()`, `secrets`, `os.urandom`).
"""

from __future__ import annotations

import hashlib
import importlib.machinery
import random
import sys
import types
from collections.abc import Sequence

_LAZY_MODULES = ("numpy.random", "torch")  # may be imported by the function: numpy loads its part on first use


class RandomSeeds:
    """Seeds random modules that are loaded, and as a module finder those loaded later. One per process."""

    def __init__(self) -> None:
        self._number = 0
        sys.meta_path[:] = [self, *(finder for finder in sys.meta_path if not isinstance(finder, RandomSeeds))]

    def start(self, seed_text: str) -> None:
        """Seed for a batch."""
        self._number = int.from_bytes(hashlib.sha256(seed_text.encode()).digest()[:8], "little")
        random.seed(self._number)
        for name in _LAZY_MODULES:
            if (module := sys.modules.get(name)) is not None:
                self._seed(module)

    def _seed(self, module: types.ModuleType) -> None:
        if module.__name__ == "torch" and hasattr(module, "manual_seed"):
            module.manual_seed(self._number)
        elif module.__name__ == "numpy.random" and hasattr(module, "seed"):
            module.seed(self._number % 2**32)

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Called by `import`: a module of `_LAZY_MODULES` is seeded when it has been loaded."""
        if name not in _LAZY_MODULES:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return spec
        load = spec.loader.exec_module

        def load_and_seed(module: types.ModuleType) -> None:
            load(module)
            self._seed(module)

        spec.loader.exec_module = load_and_seed  # type: ignore[method-assign]
        return spec
