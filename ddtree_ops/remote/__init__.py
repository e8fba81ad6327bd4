"""A host seen through ssh or locally, and its agent: run commands there, ask the agent (`ship` brings releases)."""

from .agent import Agent
from .transport import Process, Result, Transport, connect

__all__ = ["Agent", "Process", "Result", "Transport", "connect"]
