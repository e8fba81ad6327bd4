"""A host seen through a transport (ssh or local) and its agent: run commands there, ask it, ship releases."""

from .agent import Agent
from .transport import Process, Result, Transport, connect

__all__ = ["Agent", "Process", "Result", "Transport", "connect"]
