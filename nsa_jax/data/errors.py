"""The one exception of the data package."""

from __future__ import annotations


class DataError(ValueError):
    """The data cannot be used as configured.

    Args:
      where: the config field, file or dataset that is at fault.
      what: what is wrong with it.
      fix: what to change.
    """

    def __init__(self, where: str, what: str, fix: str):
        self.where = where
        self.what = what
        self.fix = fix
        super().__init__(f"{where}: {what}. Fix: {fix}")

    def __reduce__(self):
        # Worker processes send exceptions back pickled; the default would call __init__ with the joined message.
        return (type(self), (self.where, self.what, self.fix))
