"""A function of the user in place of a part of the algorithm: gets the values by the names of the parameters.

    def loss(current_logprobs, advantages): ...    # these two of all values of a loss
    def loss(advantages, **rest): ...              # `rest` gets all other values

The function runs in a process of ours, and nothing works without the result. So an exception ends the run: the log gets
the user's traceback, the terminal a line. Imports no torch, because the intake calls such a function, too.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, NoReturn

from areal_rloo.config import import_function
from areal_rloo.errors import ConfigError, UserError, defined_at, raised
from areal_rloo.telemetry.logs import get_logger

logger = get_logger(__name__)


class OwnFunction:
    """Calls the function at `path`, the value of the config's `key`."""

    def __init__(
        self, key: str, path: str, known: Sequence[str], *, passes: tuple[type[BaseException], ...] = ()
    ) -> None:
        """Import the function. `known`: the names of all values. `passes`: exceptions to leave to the caller.

        Raises:
            ConfigError: the function cannot be imported, is async, or has a parameter with another name.
        """
        self._key, self._path, self._passes = key, path, passes
        self._function = import_function(key, path)
        function = self._function
        called = type(function).__call__  # of an object
        if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(called):
            raise self.error("is async; leave out async", ConfigError)
        try:
            parameters = inspect.signature(function).parameters.values()
        except ValueError as error:
            raise self.error(f"has unknown parameters ({error}); wrap it in a function", ConfigError) from error
        self._takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
        variable = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
        named = [parameter for parameter in parameters if parameter.kind not in variable]
        self._names = {parameter.name for parameter in named}
        for parameter in named:
            if parameter.kind is parameter.POSITIONAL_ONLY:
                raise self.error(f"has the parameter '{parameter.name}' before a '/'; leave out the '/'", ConfigError)
            if parameter.name not in known and parameter.default is parameter.empty:
                words = f"has the parameter '{parameter.name}', which nothing fills; known names: {', '.join(known)}"
                raise self.error(words, ConfigError)

    def __call__(self, **values: Any) -> Any:
        """Call the function with all known values.

        Raises:
            UserError: the function raised; the log has the traceback.
        """
        wanted = values if self._takes_all else {name: values[name] for name in values if name in self._names}
        try:
            return self._function(**wanted)
        except self._passes:
            raise
        except (Exception, SystemExit) as error:
            logger.exception("%s: %s raised", self._key, self._path)
            raise UserError(f"{self._key}: {self._path} raised {raised(error)}") from error

    def refuse(self, words: str) -> NoReturn:
        """Raise a UserError about a returned value."""
        raise self.error(words)

    def error(self, words: str, kind: type[UserError] = UserError) -> UserError:
        """Make an error about the function; `words` continue its name."""
        return kind(f"{self._key}: {self._path} {words}{defined_at(self._function)}")
