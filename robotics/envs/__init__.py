"""Gymnasium environments over MuJoCo."""
