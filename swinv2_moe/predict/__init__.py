"""Predictions for pictures that belong to no data set: `load_predictor(run).predict("dog.jpg")`."""

from swinv2_moe.predict.predictor import (
    ClassProbability,
    Prediction,
    Predictor,
    find_pictures,
    load_predictor,
)

__all__ = ["ClassProbability", "Prediction", "Predictor", "find_pictures", "load_predictor"]
