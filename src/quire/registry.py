"""Classes by name: built-in ones by a short name, all others by their dotted name."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from collections.abc import Mapping
from types import ModuleType
from typing import Any, Generic, TypeVar, cast

from quire.errors import ConfigError, nearest_name

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, slots=True)
class Registry(Generic[T]):
    """The classes that a configuration field may choose among.

    Args:
        field: the configuration field, such as "SchedulerConfig.policy", for error messages.
        base: what every choice must be a subclass of.
        known: the built-in classes, by short name.
    """

    field: str
    base: type
    known: Mapping[str, type[T]]

    def build(self, choice: object, **context: Any) -> T:
        """Return a chosen object: `choice` itself if it is one, else its class built with `context`.

        Raises:
            ConfigError: `choice` is not a known name, the dotted name of a subclass, a subclass or an object.
        """
        if isinstance(choice, self.base):
            return cast(T, choice)
        return self.class_of(choice)(**context)

    def has(self, chosen: T) -> bool:
        """Whether an object is of a built-in class."""
        return type(chosen) in self.known.values()

    def class_of(self, choice: object) -> type[T]:
        """Return a chosen class: by known name, by dotted name, or given as such.

        Raises:
            ConfigError: as for `build`.
        """
        if not isinstance(choice, str):
            found = choice
        elif "." in choice:
            found = self._import(choice)
        elif choice in self.known:
            return self.known[choice]
        else:
            hint = nearest_name(choice, self.known) if self.known else "give the dotted name of a class"
            raise ConfigError(f"{self.field} is {choice!r}; {hint}")
        if not (isinstance(found, type) and issubclass(found, self.base)):
            raise ConfigError(
                f"{self.field} is {choice!r}, which is not a subclass of "
                f"{self.base.__module__}.{self.base.__qualname__}"
            )
        if inspect.isabstract(found):
            missing = ", ".join(sorted(getattr(found, "__abstractmethods__", ())))
            raise ConfigError(f"{self.field} is {choice!r}, which does not define {missing}")
        return cast(type[T], found)

    def _import(self, dotted_name: str) -> object:
        module_name, _, class_name = dotted_name.rpartition(".")
        try:
            module = importlib.import_module(module_name)
        except Exception as error:  # the user's module may raise anything when it is imported
            raise ConfigError(
                f"{self.field} is {dotted_name!r}, which cannot be imported: {type(error).__name__}: {error}"
            ) from error
        try:
            return getattr(module, class_name)
        except AttributeError:
            raise ConfigError(
                f"{self.field} is {dotted_name!r}, but {module_name} has no {class_name!r}"
                f"{self._hint(class_name, module)}"
            ) from None

    def _hint(self, class_name: str, module: ModuleType) -> str:
        fitting = [
            name
            for name, value in vars(module).items()
            if isinstance(value, type) and issubclass(value, self.base) and value is not self.base
        ]
        return f"; {nearest_name(class_name, fitting)}" if fitting else ""
