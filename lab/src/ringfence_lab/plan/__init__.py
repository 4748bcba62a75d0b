"""Predicts what a training step costs on hardware, and at scales, that one does not have.

Pure: numbers in, numbers out; no torch, no socket, no clock. It uses the schedules that the runtime runs.
"""
