"""Ending a training run before its memory does: a plain callback, and one for transformers' Trainer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from brim.errors import MissingExtra


class Watched(Protocol):
    """What a callback needs of a watch."""

    def should_stop(self) -> bool: ...
    def mark(self, text: str) -> None: ...


class StopCallback:
    """Call it once a step: False to go on. True to end, and then `save` has been called, once."""

    def __init__(self, watched: Watched, save: Callable[[], Any] | None = None) -> None:
        self._watched, self._save = watched, save
        self.stopped = False

    def __call__(self, *_: Any, **__: Any) -> bool:
        """Takes whatever a framework hands to its callbacks, and needs none of it."""
        if not self.stopped and self._watched.should_stop():
            self.stopped = True
            self._watched.mark("saving, then stopping")
            if self._save is not None:
                self._save()
        return self.stopped


def trainer_callback(watched: Watched) -> Any:
    """A `transformers.TrainerCallback`. transformers is imported here and not before."""
    try:
        from transformers import TrainerCallback  # type: ignore[import-not-found,unused-ignore]
    except ModuleNotFoundError as error:
        raise MissingExtra(
            "A callback for the Trainer needs transformers.", hint="pip install transformers", extra="embed"
        ) from error

    class BrimCallback(TrainerCallback):  # type: ignore[misc,unused-ignore]
        """Saves a checkpoint and ends the training when the watch says so; marks its beginning and end."""

        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
            watched.mark("training begins")
            return control

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
            if watched.should_stop() and not control.should_training_stop:
                watched.mark(f"step {state.global_step}: saving, then stopping")
                control.should_save = True
                control.should_training_stop = True
            return control

        def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
            watched.mark("training ends")
            return control

    return BrimCallback()
