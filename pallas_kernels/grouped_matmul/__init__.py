"""Expert matrix products with MXFP4 weights that stay packed; see api.py."""
