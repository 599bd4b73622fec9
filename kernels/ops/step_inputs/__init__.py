"""Inputs of a step, computed from the rows' state on the device."""
