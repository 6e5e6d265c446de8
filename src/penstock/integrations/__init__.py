"""Runs models of transformers and diffusers, and any other module, under one cap of memory.

`apply` takes a model or a pipeline that is in memory; `load` begins with the folder of a checkpoint. Only the
methods through which components are called are replaced: configuration, `generate`, schedulers and callbacks
stay.
"""

from penstock.integrations.applied import Applied, apply, load

__all__ = ["Applied", "apply", "load"]
