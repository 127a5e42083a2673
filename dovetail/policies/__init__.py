"""Distribution policies, one file each: a graph and resources go in, a plan comes out."""

from dovetail.lazy import lazy_attributes

POLICIES: dict[str, str] = {
    "fused": "dovetail.policies.fused:Fused",
    "local": "dovetail.policies.local:Local",
}
"""The policies by their names on the command line."""

__getattr__, __dir__, __all__ = lazy_attributes(POLICIES.values())
