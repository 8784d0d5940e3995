"""The separation baseline: an image codec, then 5G LDPC and QAM with link adaptation."""
