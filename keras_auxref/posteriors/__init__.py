"""Flows for the posteriors of variational autoencoders: an encoder gives every sample its own parameters."""

from keras_auxref.posteriors.factored_flow import FactoredFlow
from keras_auxref.posteriors.householder_flow import HouseholderFlow
from keras_auxref.posteriors.sylvester_flow import SylvesterFlow

__all__ = ["FactoredFlow", "HouseholderFlow", "SylvesterFlow"]
