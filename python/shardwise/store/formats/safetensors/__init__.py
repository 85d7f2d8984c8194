"""The safetensors format: single files, and folders with an index in Hugging Face's format.

| module | answers |
|---|---|
| `header` | what a file has |
| `form` | a file, opened |
| `folder` | a folder with an index |
"""
