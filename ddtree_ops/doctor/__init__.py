"""What will go wrong on a host, said before it does."""
