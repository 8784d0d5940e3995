"""CSI prediction: predictors behind one protocol, and the LightningModule that trains them."""
