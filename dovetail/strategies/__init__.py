"""Distribution strategies, one file each: graph × resources → plan."""

from dovetail.lazy import lazy_attributes

STRATEGIES: dict[str, str] = {
    "fused": "dovetail.strategies.fused:Fused",
    "local": "dovetail.strategies.local:Local",
    "actor-learner": "dovetail.strategies.actor_learner:ActorLearner",
    "central-inference": "dovetail.strategies.central_inference:CentralInference",
    "split-devices": "dovetail.strategies.split_devices:SplitDevices",
    "data-parallel": "dovetail.strategies.data_parallel:DataParallel",
    "parameter-server": "dovetail.strategies.parameter_server:ParameterServer",
    "environments": "dovetail.strategies.environments:Environments",
}
"""Command-line name → class."""

__getattr__, __dir__, __all__ = lazy_attributes(
    [
        *STRATEGIES.values(),
        "dovetail.strategies.interface:Strategy",
    ]
)
