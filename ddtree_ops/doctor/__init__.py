"""What will go wrong on a host, said before it does.

Pure: ``host_facts`` types what a collector answered, ``examine`` judges it. Acting: ``collector`` asks a host in one
round trip, ``active`` tries things there.
"""
