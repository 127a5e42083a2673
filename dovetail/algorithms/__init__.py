"""Algorithms, one file each, read from top to bottom."""

from dovetail.lazy import lazy_attributes

ALGORITHMS: dict[str, str] = {
    "ppo": "dovetail.algorithms.ppo:PPO",
    "a2c": "dovetail.algorithms.a2c:A2C",
    "reinforce": "dovetail.algorithms.reinforce:REINFORCE",
    "impala": "dovetail.algorithms.impala:IMPALA",
    "appo": "dovetail.algorithms.appo:APPO",
    "a3c": "dovetail.algorithms.a3c:A3C",
    "dqn": "dovetail.algorithms.dqn:DQN",
    "qr-dqn": "dovetail.algorithms.qr_dqn:QRDQN",
    "apex": "dovetail.algorithms.apex:ApeX",
    "r2d2": "dovetail.algorithms.r2d2:R2D2",
    "ddpg": "dovetail.algorithms.ddpg:DDPG",
    "d4pg": "dovetail.algorithms.d4pg:D4PG",
    "td3": "dovetail.algorithms.td3:TD3",
    "sac": "dovetail.algorithms.sac:SAC",
    "sac-discrete": "dovetail.algorithms.sac_discrete:SACDiscrete",
    "bc": "dovetail.algorithms.bc:BC",
    "td3-bc": "dovetail.algorithms.td3_bc:TD3BC",
    "cql": "dovetail.algorithms.cql:CQL",
    "discrete-cql": "dovetail.algorithms.discrete_cql:DiscreteCQL",
    "iql": "dovetail.algorithms.iql:IQL",
    "awac": "dovetail.algorithms.awac:AWAC",
}
"""The algorithms by their names on the command line."""

__getattr__, __dir__, __all__ = lazy_attributes(ALGORITHMS.values())
