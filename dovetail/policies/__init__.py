"""Distribution policies, one file each: a graph and resources go in, a plan comes out."""

from dovetail.lazy import lazy_attributes

POLICIES: dict[str, str] = {
    "fused": "dovetail.policies.fused:Fused",
    "local": "dovetail.policies.local:Local",
    "actor-learner": "dovetail.policies.actor_learner:ActorLearner",
    "central-inference": "dovetail.policies.central_inference:CentralInference",
    "split-devices": "dovetail.policies.split_devices:SplitDevices",
    "data-parallel": "dovetail.policies.data_parallel:DataParallel",
    "parameter-server": "dovetail.policies.parameter_server:ParameterServer",
    "environments": "dovetail.policies.environments:Environments",
}
"""The policies by their names on the command line."""

__getattr__, __dir__, __all__ = lazy_attributes(
    [
        *POLICIES.values(),
        "dovetail.policies.interface:Policy",
    ]
)
