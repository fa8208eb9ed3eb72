"""Gymnasium environments over MuJoCo. Importing this package registers them; it imports no torch and no LeRobot."""

from gymnasium.envs.registration import register, registry

ENVIRONMENTS = {
    "mmrl/Reach-v0": "reach",
    "mmrl/Push-v0": "push",
    "mmrl/Lift-v0": "lift",
    "mmrl/Place-v0": "place",
    "mmrl/Stack-v0": "stack",
    "mmrl/OpenDrawer-v0": "open_drawer",
    "mmrl/CloseDrawer-v0": "close_drawer",
    "mmrl/Press-v0": "press",
    "mmrl/TwoStep-v0": "two_step",
}
"""Task family of each environment id."""

for _id, _family in ENVIRONMENTS.items():
    if _id not in registry:
        # The environment counts its own steps, since divergence and the time limit must be told apart.
        register(_id, entry_point="robotics.envs.gym_env:ArmEnv", kwargs={"family": _family})
