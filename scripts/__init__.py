"""Development tools: benchmarks, the load generator, distillation of draft models, and generated documentation."""
