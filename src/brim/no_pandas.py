"""A process without pandas: pyarrow imports it at its first array where it is installed, for 35 MB and 0.3 s.

For the command line and for workers that run nothing of the user's. Where a user's function runs, it may need it.
"""

from __future__ import annotations

import sys


class _NoPandas:
    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name == "pandas":
            raise ModuleNotFoundError("this process of brim does without pandas", name=name)


def do_without_pandas() -> None:
    sys.meta_path.insert(0, _NoPandas())
