"""A host seen through a transport (ssh or local) and its agent: run commands there, ask the agent, ship releases."""

from .agent import Agent
from .ship import ShipReport, ship
from .transport import Process, Result, Transport, connect

__all__ = ["Agent", "Process", "Result", "ShipReport", "Transport", "connect", "ship"]
