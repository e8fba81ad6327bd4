"""A host seen through a transport (ssh or local) and its agent: run commands there, ask the agent, ship releases."""
