"""Off-policy evaluation: a policy's value from recorded data alone, without an environment."""

from dovetail.lazy import lazy_attributes

__getattr__, __dir__, __all__ = lazy_attributes(
    [
        "dovetail.estimation.estimate:Estimate",
        "dovetail.estimation.estimate:estimate",
        "dovetail.estimation.estimate:estimate_policy",
        "dovetail.estimation.fitted_q:FittedQ",
    ],
    package="dovetail.estimation",
)
