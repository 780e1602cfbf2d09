"""The launch's arithmetic in torch, one module a stage, comparable from any stage to any stage.

Every function takes an ``Arithmetic``: ``EXACT`` computes in float64 and rounds nowhere; ``ROUNDED`` rounds where the launch rounds and adds
in the CPU target's order, so that it repeats that target bit for bit on any input.
"""
