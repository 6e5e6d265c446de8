"""Models of transformers and diffusers, and any other module, under one cap of memory, in one line.

`apply` takes a model or a pipeline that is in memory; `load` begins with a checkpoint's folder. Only
`forward` of each component is replaced: configuration, `generate`, schedulers and callbacks stay.
"""

from penstock.integrations.applied import Applied, apply, load

__all__ = ["Applied", "apply", "load"]
