"""The safetensors format: single files, and folders with an index in Hugging Face's format.

| module | answers |
|---|---|
| `header` | the header of a file |
| `form` | a file or folder, opened |
| `folder` | the files of a folder, with an index or without |
"""
