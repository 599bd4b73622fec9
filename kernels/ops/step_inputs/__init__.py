"""From rows of device state to the inputs of a step."""
