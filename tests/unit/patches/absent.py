"""Stand-ins for the third-party packages that SGLang imports and the code under test never calls.

Importing SGLang whole needs gigabytes of CUDA wheels. The functions that the patches change need torch and Python; what
is beside them in their modules needs names to exist. So while SGLang is being imported here, a package that is not
installed becomes a module whose every attribute is an inert class. Nothing of SGLang itself is ever replaced.
"""

from __future__ import annotations

import asyncio
import importlib.util
import pickle
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import FunctionType, ModuleType
from typing import Any

#: absent, and called while SGLang is being imported: the standard library's nearest
LIKE: dict[str, ModuleType] = {"dill": pickle, "regex": re, "uvloop": ModuleType("uvloop")}
LIKE["uvloop"].__dict__["EventLoopPolicy"] = asyncio.DefaultEventLoopPolicy

#: triton's way to its device: there is none
LACKING = {"driver"}
#: a list of transformers', by a name that looks like one of Python's
LISTS = {"__class_validators__"}


class _Meta(type):
    """Classes that answer any attribute, item, call or operator with one of themselves."""

    def __getattr__(cls, name: str) -> Any:
        if name in LISTS:
            return []
        if name in LACKING or (name.startswith("__") and name.endswith("__")):
            raise AttributeError(name)
        return _inert(name)

    def __getitem__(cls, item: object) -> Any:
        return cls

    def __setitem__(cls, key: object, value: object) -> None:
        pass

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        # a decorator gives back what it decorates, with or without arguments
        if len(args) == 1 and not kwargs and isinstance(args[0], FunctionType):
            return args[0]
        return super().__call__() if cls.__dict__.get("_own") is None else cls

    def __or__(cls, other: object) -> Any:
        return cls

    def __ror__(cls, other: object) -> Any:
        return cls


class _Inert(metaclass=_Meta):
    _own: bool | None = True

    def __init_subclass__(cls, **kwargs: Any) -> None:
        cls._own = None

    @classmethod
    def __get_pydantic_core_schema__(cls, *args: Any) -> Any:
        return {"type": "any"}


def _inert(name: str) -> type:
    made = _Meta(name, (_Inert,), {})
    made._own = True  # type: ignore[attr-defined]
    return made


class _Module(ModuleType):
    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__ = []
        self.__version__ = "0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        value = _inert(name)
        setattr(self, name, value)
        return value


def _asked_by_sglang() -> bool:
    """Other packages try what may be absent, and mean it."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("importlib"):
        frame = frame.f_back
    return str(frame.f_globals.get("__name__", "")).partition(".")[0] == "sglang"


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
        if not _asked_by_sglang():
            return None
        return ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        self.made.add(spec.name)
        return LIKE.get(spec.name) or _Module(spec.name)

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
