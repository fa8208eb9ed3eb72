"""Gymnasium environments over MuJoCo. Importing this package registers them; it imports no torch and no LeRobot."""

from gymnasium.envs.registration import register, registry

if "mmrl/Reach-v0" not in registry:
    # The environment counts its own steps, since divergence and the time limit must be told apart.
    register("mmrl/Reach-v0", entry_point="robotics.envs.gym_env:ArmEnv", kwargs={"family": "reach"})
