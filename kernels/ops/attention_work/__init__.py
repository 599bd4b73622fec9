"""Work list of a step's attention: division of the step into decode items and prefill tiles of similar cost."""
