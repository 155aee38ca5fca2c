"""The one error of this package: what is wrong with a model, and what to do about it."""

from __future__ import annotations


class ModelError(Exception):
    """A model that cannot be served as it was given.

    what: the fact, with names and numbers. do: the next step for the person who reads it.
    """

    def __init__(self, what: str, do: str) -> None:
        # both go to Exception so that the error survives pickling between processes
        super().__init__(what, do)
        self.what = what
        self.do = do

    def __str__(self) -> str:
        return f"{self.what}\n{self.do}"
