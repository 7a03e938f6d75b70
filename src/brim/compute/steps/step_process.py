"""Make a step in a separate process, so that the imports of the user's module do not stay in brim's memory.

`brim map --fn module:function` checks the function (does it exist, has it changed since the last run), but only workers
need it loaded. A module that imports torch takes 300 MB: saving that is worth a second.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys

from brim.compute.steps.map_options import MapStepOptions
from brim.compute.steps.map_step import MapStep
from brim.errors import BrimError, InputError
from brim.monitor.watching.launch import HOME


def make_step(function: str, options: MapStepOptions) -> MapStep:
    """Make the step for a function given by name."""
    environment = dict(os.environ)
    environment["PYTHONPATH"] = os.pathsep.join([str(HOME), *filter(None, [environment.get("PYTHONPATH")])])
    process = subprocess.run(
        [sys.executable, "-P", "-m", "brim.compute.steps.step_process"],
        input=pickle.dumps((function, options)),
        stdout=subprocess.PIPE,
        env=environment,
        check=False,
    )
    try:
        step = pickle.loads(process.stdout)
    except (pickle.UnpicklingError, EOFError) as error:
        raise InputError(
            f"Loading {function} ended its process ({process.returncode}).",
            hint="Check that Python can import its module.",
        ) from error
    if isinstance(step, BrimError):
        raise step
    return step  # type: ignore[no-any-return]


def main() -> None:
    answer = os.dup(1)
    os.dup2(2, 1)  # the module's output goes to stderr
    function, options = pickle.load(sys.stdin.buffer)
    try:
        from brim.compute.steps.functions import load_function

        result: MapStep | BrimError = MapStep(load_function(function), options)
    except BrimError as error:
        result = error
    with open(answer, "wb") as file:
        file.write(pickle.dumps(result))


if __name__ == "__main__":
    main()
