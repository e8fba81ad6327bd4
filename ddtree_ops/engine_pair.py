"""Where the tiny pair's data lie. Apart from the engine, so that the CLI need not import torch to find them."""

from pathlib import Path

PAIR = Path(__file__).parent / "engine" / "pair"
HELD_OUT = PAIR / "held_out.json"
