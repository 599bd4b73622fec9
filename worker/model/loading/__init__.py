"""Opening of models: GGUF files and Hugging Face folders become a specification, weights and a text bundle."""

from worker.model.loading.model_files import ModelFiles
from worker.model.loading.open_model import default_model_path, open_model

__all__ = ["ModelFiles", "default_model_path", "open_model"]
