"""Execution of step plans on the devices of one worker.

The package loads the models of each tensor-parallel rank, sizes and allocates the KV cache, stages plans as device
tensors, runs the model and the sampler, and returns the results without blocking the engine loop. `build_executor` is
the entry point; `LocalExecutor` is the interface that the engine sees.
"""
