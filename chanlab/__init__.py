"""chanlab: learning on wireless channels.

Trace (or draw, or import) a channel once, store it as paths, and let every learner and every link-level simulation read
the view it needs from that one store.
"""

__version__ = "0.1.0"

__all__ = ["__version__"]
