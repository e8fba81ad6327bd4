"""Stand-ins for the third-party packages that SGLang imports and the code under test never calls.

Importing SGLang whole needs gigabytes of CUDA wheels. The functions that the patches change need torch and Python; what
is beside them in their modules needs names to exist. So while SGLang is being imported here, a package that is not
installed becomes a module whose every attribute is an inert class. Nothing of SGLang itself is ever replaced.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class _Meta(type):
    """Classes that answer any attribute, item, call or operator with one of themselves."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        return _inert(name)

    def __getitem__(cls, item: object) -> Any:
        return cls

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        # a decorator gives back what it decorates, with or without arguments
        if len(args) == 1 and not kwargs and callable(args[0]) and not isinstance(args[0], _Meta):
            return args[0]
        return super().__call__() if cls.__dict__.get("_own") is None else cls

    def __or__(cls, other: object) -> Any:
        return cls

    def __ror__(cls, other: object) -> Any:
        return cls


class _Inert(metaclass=_Meta):
    _own = True

    def __init_subclass__(cls, **kwargs: Any) -> None:
        cls._own = None


def _inert(name: str) -> type:
    made = _Meta(name, (_Inert,), {})
    made._own = True  # type: ignore[attr-defined]
    return made


class _Module(ModuleType):
    __path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        value = _inert(name)
        setattr(self, name, value)
        return value


class _Finder(MetaPathFinder, Loader):
    """Last in line: finds what nobody else did, unless it is SGLang's own or the standard library's."""

    def __init__(self) -> None:
        self.made: set[str] = set()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        top = fullname.partition(".")[0]
        known = top in sys.modules and top not in self.made
        if top in {"sglang", *sys.stdlib_module_names} or known or (top != fullname and top not in self.made):
            return None
        return ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        self.made.add(spec.name)
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


@contextmanager
def absent_packages() -> Iterator[None]:
    """Inside, imports of absent packages succeed; afterwards those stand-ins are gone from ``sys.modules``."""
    finder = _Finder()
    sys.meta_path.append(finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in finder.made:
            sys.modules.pop(name, None)
        importlib.invalidate_caches()
