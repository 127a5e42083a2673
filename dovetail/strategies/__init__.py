"""Strategies, one file each: a graph and resources go in, a plan comes out."""

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
"""The strategies by their names on the command line."""

__getattr__, __dir__, __all__ = lazy_attributes(
    [
        *STRATEGIES.values(),
        "dovetail.strategies.interface:Strategy",
    ]
)
