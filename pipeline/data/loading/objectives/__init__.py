"""Objectives: what a model is asked to predict in a window, and how the tokens are arranged for it."""
