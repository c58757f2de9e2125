"""Predictions for pictures that belong to no data set."""
