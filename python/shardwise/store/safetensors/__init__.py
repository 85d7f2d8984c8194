"""The safetensors format: single files, and folders with an index in Hugging Face's format."""
