"""The ways in which ranks of one node see each other's memory."""
