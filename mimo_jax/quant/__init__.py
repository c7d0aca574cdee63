"""Array formats of quantized weights; no files, no models."""
