"""Peer memory and agreement between the ranks of one node.

Importing this package touches no device and starts nothing.
"""

__version__ = "0.1.0"
