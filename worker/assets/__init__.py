"""Models on disk: finding, fetching, converting and describing them. Torch-free.

`resolve.py` turns what a user typed into a folder in Hugging Face form; `checkpoint.py` describes such a
folder. Nothing here knows of engines or requests.
"""
